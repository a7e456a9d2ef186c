"""The database and the artifact store: schema, migrations, opening, loading, finding, retention."""
