"""Face recognition: backbone, model, datasets and verification."""
