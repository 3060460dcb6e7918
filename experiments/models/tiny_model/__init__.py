"""Parts of the training of the embedded model: data, evaluation, card."""
