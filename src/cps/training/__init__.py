"""How a subnetwork is trained."""
