"""Spark's local files without a process for each of them.

Hadoop without its native library starts `chmod` for every file and directory it makes, to give it the mode that it has
already: of a small batch that is most of the time.
"""

from typing import Final

import pyspark
from pyspark.sql import SparkSession

_PACKAGE: Final = "org.apache.spark.sql.execution.streaming" + (
    "" if pyspark.__version__.startswith("4.0.") else ".checkpointing"
)
# Spark's default goes to such files by another way, which starts those processes too; what is stored is the same.
QUIET: Final = {"spark.sql.streaming.checkpointFileManagerClass": f"{_PACKAGE}.FileSystemBasedCheckpointFileManager"}
_SOURCE: Final = """
import org.apache.hadoop.fs.LocalFileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RawLocalFileSystem;
import org.apache.hadoop.fs.permission.FsPermission;

public class QuietFileSystem extends LocalFileSystem {
    public QuietFileSystem() { super(new Raw()); }

    public static class Raw extends RawLocalFileSystem {
        public void setPermission(Path path, FsPermission permission) { }
    }
}
"""


def make_files_quiet(spark: SparkSession) -> None:
    """Let this JVM make local files without `chmod`, as far as it goes to them by a `FileSystem`, which it caches."""
    jvm = spark._jvm
    assert jvm is not None
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(jvm.Thread.currentThread().getContextClassLoader())
    compiler.cook(_SOURCE)
    conf = jvm.org.apache.hadoop.conf.Configuration(spark.sparkContext._jsc.hadoopConfiguration())
    conf.setClassLoader(compiler.getClassLoader())
    conf.set("fs.file.impl", "QuietFileSystem")
    files = jvm.org.apache.hadoop.fs.FileSystem
    files.closeAll()
    found = files.get(jvm.java.net.URI("file:///"), conf)
    assert found.getClass().getName() == "QuietFileSystem"
