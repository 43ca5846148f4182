"""Rewards that come from a server: requests, retries, a circuit breaker. Import-light."""
