"""Agent programs as environments: what they ask over HTTP are the policy's turns."""
