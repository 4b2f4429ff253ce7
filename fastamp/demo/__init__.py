"""Demo dataset of generated pedestrians in the layout of Market-1501."""

from fastamp.demo.attributes import VALUES, ImageAttributes
from fastamp.demo.generate import DEMO_VERSION, generate_demo, image_attributes, is_complete

__all__ = [
    "DEMO_VERSION",
    "VALUES",
    "ImageAttributes",
    "generate_demo",
    "image_attributes",
    "is_complete",
]
