"""Real runs at the pace of modelled devices: generators and trainer on devices of their own."""
