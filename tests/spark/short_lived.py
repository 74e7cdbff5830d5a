"""Settings of a JVM that lives for a minute or two, on a machine that has other work."""

from typing import Final

# What the second compiler makes of such a run is never paid back, and a collector needs no thread for each core: half
# of the time that the JVM takes.
SHORT_LIVED: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
