"""Data sets by name; importing this registers them."""

from fastamp.data.datasets.airportalert import AirportALERT
from fastamp.data.datasets.base import DATASET_REGISTRY, ImageDataset, ImageItem, data_root
from fastamp.data.datasets.caviara import CAVIARa
from fastamp.data.datasets.cuhk03 import CUHK03
from fastamp.data.datasets.cuhksysu import cuhkSYSU
from fastamp.data.datasets.demo import Demo
from fastamp.data.datasets.dukemtmc import DukeMTMC
from fastamp.data.datasets.grid import GRID
from fastamp.data.datasets.ilids import iLIDS
from fastamp.data.datasets.lpw import LPW
from fastamp.data.datasets.market1501 import Market1501
from fastamp.data.datasets.msmt17 import MSMT17
from fastamp.data.datasets.named import MarketImages, NamedImages
from fastamp.data.datasets.occludedduke import OccludedDuke
from fastamp.data.datasets.pes3d import PeS3D
from fastamp.data.datasets.pku import PKU
from fastamp.data.datasets.prai import PRAI
from fastamp.data.datasets.prid import PRID
from fastamp.data.datasets.saivt import SAIVT
from fastamp.data.datasets.sensereid import SenseReID
from fastamp.data.datasets.shinpuhkan import Shinpuhkan
from fastamp.data.datasets.sysu_mm import SYSU_mm
from fastamp.data.datasets.thermalworld import Thermalworld
from fastamp.data.datasets.vehicleid import LargeVehicleID, MediumVehicleID, SmallVehicleID, VehicleID
from fastamp.data.datasets.veri import VeRi
from fastamp.data.datasets.veriwild import LargeVeRiWild, MediumVeRiWild, SmallVeRiWild, VeRiWild
from fastamp.data.datasets.viper import VIPeR
from fastamp.data.datasets.wildtrackcrop import WildTrackCrop

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
    "ImageDataset",
    "ImageItem",
    "LargeVeRiWild",
    "LargeVehicleID",
    "Market1501",
    "MarketImages",
    "MediumVeRiWild",
    "MediumVehicleID",
    "NamedImages",
    "OccludedDuke",
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
