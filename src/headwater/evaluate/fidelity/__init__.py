"""How far prompts composed of segments are from those computed whole, layer by layer. Offline, without the engine."""
