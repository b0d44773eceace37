"""Alembic's entry: runs the revisions it is asked for on the connection it is given."""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    version_table="kd_alembic",
    transaction_per_migration=False,
)
with context.begin_transaction():
    context.run_migrations()
