"""Dataset classes; importing this package registers them."""

from fastamp.data.datasets import (  # noqa: F401  register their datasets
    aerial_ground,
    cloth_changing,
    demo_animals,
    demo_variants,
    products,
    video,
    visible_infrared,
)
from fastamp.data.datasets.airportalert import AirportALERT
from fastamp.data.datasets.base import DATASET_REGISTRY, ImageDataset, ImageItem, data_root
from fastamp.data.datasets.catalog import (
    GRID,
    LPW,
    PKU,
    PRAI,
    PRID,
    SAIVT,
    CAVIARa,
    DukeMTMC,
    PeS3D,
    Shinpuhkan,
    SYSU_mm,
    Thermalworld,
    WildTrackCrop,
    cuhkSYSU,
    iLIDS,
)
from fastamp.data.datasets.cuhk03 import CUHK03
from fastamp.data.datasets.demo import Demo
from fastamp.data.datasets.filename_dataset import FilenameDataset
from fastamp.data.datasets.market1501 import Market1501
from fastamp.data.datasets.msmt17 import MSMT17
from fastamp.data.datasets.sensereid import SenseReID
from fastamp.data.datasets.vehicleid import LargeVehicleID, MediumVehicleID, SmallVehicleID, VehicleID
from fastamp.data.datasets.veri import VeRi
from fastamp.data.datasets.veriwild import LargeVeRiWild, MediumVeRiWild, SmallVeRiWild, VeRiWild
from fastamp.data.datasets.viper import VIPeR

__all__ = [
    "CUHK03",
    "DATASET_REGISTRY",
    "GRID",
    "LPW",
    "MSMT17",
    "PKU",
    "PRAI",
    "PRID",
    "SAIVT",
    "AirportALERT",
    "CAVIARa",
    "Demo",
    "DukeMTMC",
    "FilenameDataset",
    "ImageDataset",
    "ImageItem",
    "LargeVeRiWild",
    "LargeVehicleID",
    "Market1501",
    "MediumVeRiWild",
    "MediumVehicleID",
    "PeS3D",
    "SYSU_mm",
    "SenseReID",
    "Shinpuhkan",
    "SmallVeRiWild",
    "SmallVehicleID",
    "Thermalworld",
    "VIPeR",
    "VeRi",
    "VeRiWild",
    "VehicleID",
    "WildTrackCrop",
    "cuhkSYSU",
    "data_root",
    "iLIDS",
]
