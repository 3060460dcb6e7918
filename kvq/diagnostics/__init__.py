"""Pure functions of tensors that analyse the errors of a codec: norms, ranges, attention."""
