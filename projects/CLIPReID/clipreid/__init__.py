"""CLIP-ReID: learned text prompts of identities, as targets of an image encoder."""
