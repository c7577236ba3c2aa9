"""Classifiers that are a closed form of sums over fixed features: no training, no images kept, exact unlearning."""
