"""Overhaul distillation: feature maps of a teacher's stages as targets of a student."""
