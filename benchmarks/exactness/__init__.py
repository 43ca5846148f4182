"""Which modes sample exactly from the policy, and by how much the others do not."""
