"""Agent programs as environments: their HTTP requests become turns of the policy."""
