"""Chat formats: items to token ids, and sampled ids back to deltas. One file per format."""
