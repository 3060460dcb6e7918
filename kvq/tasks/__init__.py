"""Evaluation tasks: each measures a method through the cache, or its codecs and a model's states directly."""
