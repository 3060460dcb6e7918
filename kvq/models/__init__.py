"""Models: loading, fingerprints, function-preserving outlier implants, the embedded tiny model."""
