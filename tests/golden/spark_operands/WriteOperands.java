// Wrote comma.zip and nothing.zip: RocksDB directories of Spark 4.3, as one loads them, with operands in three SST files
// that nothing has merged yet. The argument is an empty directory; then each `3.zip` and its SSTs under their local names.
//
//   java -cp "$(python -c 'import pyspark; print(pyspark.__path__[0])')/jars/*" WriteOperands.java DIRECTORY

import java.io.File;
import org.apache.hadoop.conf.Configuration;
import org.apache.spark.sql.execution.streaming.state.RocksDB;
import org.apache.spark.sql.execution.streaming.state.RocksDBConf;
import org.apache.spark.sql.execution.streaming.state.RocksDBConf$;
import org.apache.spark.sql.execution.streaming.state.StateStoreConf;
import org.apache.spark.sql.internal.SQLConf;
import scala.Option;
import scala.collection.immutable.HashMap;

public class WriteOperands {
    static RocksDB db;

    static void put(String key, String value) {
        db.put(key.getBytes(), value.getBytes(), "default", false, false, false);
    }

    static void merge(String key, String value) {
        db.merge(key.getBytes(), value.getBytes(), "default", false, false, false);
    }

    static void commitAndLoad(long version) {
        db.commit(true);
        db.load(version, Option.empty(), false, false);
    }

    public static void main(String[] arguments) throws Exception {
        for (int operatorVersion = 1; operatorVersion <= 2; operatorVersion++) {
            SQLConf session = new SQLConf();
            session.setConfString(
                "spark.sql.streaming.stateStore.rocksdb.mergeOperatorVersion", "" + operatorVersion);
            RocksDBConf conf = RocksDBConf$.MODULE$.apply(new StateStoreConf(session, new HashMap<String, String>()));
            File root = new File(arguments[0], "operator" + operatorVersion);
            File local = new File(arguments[0], "local" + operatorVersion);
            root.mkdirs();
            local.mkdirs();
            db = new RocksDB(root.getPath(), conf, local, new Configuration(), "", true, false, 0,
                Option.empty(), Option.empty());
            db.load(0, Option.empty(), false, false);
            db.createColFamilyIfAbsent("default", false, true);
            put("k1", "base");
            put("k2", "put");
            commitAndLoad(1);
            merge("k1", "one");
            merge("k3", "first");
            commitAndLoad(2);
            merge("k1", "two");
            merge("k3", "second");
            commitAndLoad(3);
            db.close();
        }
    }
}
