"""The shared network, its masks and its sealed subnetworks."""
