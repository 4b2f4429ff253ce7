"""Dataset classes; importing this package registers them."""

from fastamp.data.datasets.aerial_ground import AGReID, AGReIDGroundToAerial, AGReIDv2
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
    OccludedDuke,
    PeS3D,
    Shinpuhkan,
    SYSU_mm,
    Thermalworld,
    WildTrackCrop,
    cuhkSYSU,
    iLIDS,
)
from fastamp.data.datasets.cloth_changing import (
    LTCC,
    PRCC,
    PRCCSC,
    DeepChange,
    LaST,
    VCClothes,
    VCClothesCC,
    VCClothesSC,
)
from fastamp.data.datasets.cuhk03 import CUHK03
from fastamp.data.datasets.demo import Demo
from fastamp.data.datasets.demo_animals import DemoAnimals
from fastamp.data.datasets.demo_variants import DemoAerial, DemoClothes, DemoInfrared, DemoVideo
from fastamp.data.datasets.filename_dataset import FilenameDataset, MarketStyleDataset
from fastamp.data.datasets.market1501 import Market1501
from fastamp.data.datasets.msmt17 import MSMT17
from fastamp.data.datasets.products import CUB200, SOP, InShop
from fastamp.data.datasets.sensereid import SenseReID
from fastamp.data.datasets.vehicleid import LargeVehicleID, MediumVehicleID, SmallVehicleID, VehicleID
from fastamp.data.datasets.veri import VeRi
from fastamp.data.datasets.veriwild import LargeVeRiWild, MediumVeRiWild, SmallVeRiWild, VeRiWild
from fastamp.data.datasets.video import CCVID, MARS, PRID2011, DukeMTMCVideo, iLIDSVID
from fastamp.data.datasets.viper import VIPeR
from fastamp.data.datasets.visible_infrared import (
    LLCM,
    SYSUMM01,
    LLCMVisibleToInfrared,
    RegDB,
    RegDBThermalToVisible,
)

__all__ = [
    "CCVID",
    "CUB200",
    "CUHK03",
    "DATASET_REGISTRY",
    "GRID",
    "LLCM",
    "LPW",
    "LTCC",
    "MARS",
    "MSMT17",
    "PKU",
    "PRAI",
    "PRCC",
    "PRCCSC",
    "PRID",
    "PRID2011",
    "SAIVT",
    "SOP",
    "SYSUMM01",
    "AGReID",
    "AGReIDGroundToAerial",
    "AGReIDv2",
    "AirportALERT",
    "CAVIARa",
    "DeepChange",
    "Demo",
    "DemoAerial",
    "DemoAnimals",
    "DemoClothes",
    "DemoInfrared",
    "DemoVideo",
    "DukeMTMC",
    "DukeMTMCVideo",
    "FilenameDataset",
    "ImageDataset",
    "ImageItem",
    "InShop",
    "LLCMVisibleToInfrared",
    "LaST",
    "LargeVeRiWild",
    "LargeVehicleID",
    "Market1501",
    "MarketStyleDataset",
    "MediumVeRiWild",
    "MediumVehicleID",
    "OccludedDuke",
    "PeS3D",
    "RegDB",
    "RegDBThermalToVisible",
    "SYSU_mm",
    "SenseReID",
    "Shinpuhkan",
    "SmallVeRiWild",
    "SmallVehicleID",
    "Thermalworld",
    "VCClothes",
    "VCClothesCC",
    "VCClothesSC",
    "VIPeR",
    "VeRi",
    "VeRiWild",
    "VehicleID",
    "WildTrackCrop",
    "cuhkSYSU",
    "data_root",
    "iLIDS",
    "iLIDSVID",
]
