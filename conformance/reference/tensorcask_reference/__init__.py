"""A second reader of tensorcask casks and stores, written from `spec/` alone."""
