"""The demo data set: drawn pedestrians in Market-1501's layout, generated on first use."""

from fastamp.demo.generate import DEMO_VERSION, generate_demo, is_complete
from fastamp.demo.sheet import contact_sheet

__all__ = ["DEMO_VERSION", "contact_sheet", "generate_demo", "is_complete"]
