"""Methods: a codec for keys, a codec for values and a residual policy, built from YAML."""
