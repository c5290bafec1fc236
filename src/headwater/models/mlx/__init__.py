"""Models in folders that mlx-lm and mlx-vlm write, the format of MLX on Apple's machines."""
