"""Collection: plans, runs and what they leave behind (design 0002, D1 to D11; design 0006)."""

from engine.collect.hands import KEYS_TOLD_MAX, Deleted, Hands, Listing, Swept
from engine.collect.own_hands import OwnHands, delete_keys, list_uploads
from engine.collect.report import CollectReport, KeptCommit
from engine.collect.run import DELETE_SHARE_MAX, collect

__all__ = [
    "DELETE_SHARE_MAX",
    "KEYS_TOLD_MAX",
    "CollectReport",
    "Deleted",
    "Hands",
    "KeptCommit",
    "Listing",
    "OwnHands",
    "Swept",
    "collect",
    "delete_keys",
    "list_uploads",
]
