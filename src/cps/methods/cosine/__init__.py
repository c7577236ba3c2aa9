"""What LUCIR, PODNet and AFC share: heads that compare directions, and distances of features and maps."""
