"""Text to score: the embedded corpora, datasets as token streams, and synthetic retrieval."""
