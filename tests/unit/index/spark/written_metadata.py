"""The metadata of queries and operators as Spark writes them: the product reads them, and only tests write any."""

from typing import Any

from index.errors import BatchLogError
from index.java_text import encode_jackson
from index.spark.query_logs import OperatorMetadata


def encode_query_id(query_id: str) -> bytes:
    return encode_jackson({"id": query_id})


def encode_operator(operator: OperatorMetadata) -> bytes:
    is_first = operator.version == 1
    if is_first and (operator.properties or any(store.schema_paths for store in operator.stores)):
        raise BatchLogError("version 1 has no field for schemas and properties", subject="operator metadata")
    stores = []
    for store in operator.stores:
        fields: dict[str, Any] = {
            "storeName": store.name,
            "numColsPrefixKey": store.prefix_columns_count,
            "numPartitions": store.partitions_count,
        }
        stores.append(fields if is_first else fields | {"stateSchemaFilePaths": store.schema_paths})
    whole = {"operatorInfo": {"operatorId": operator.id, "operatorName": operator.name}, "stateStoreInfo": stores}
    if not is_first:
        whole["operatorPropertiesJson"] = operator.properties
    return f"v{operator.version}\n".encode() + encode_jackson(whole)
