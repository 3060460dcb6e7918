"""Other programs that run the models: llama.cpp and MLX-LM, and llama.cpp's files of log-probabilities."""
