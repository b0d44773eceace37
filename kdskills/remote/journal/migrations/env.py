"""Run the migrations on the connection that was handed over; there is no command line of their own."""

from alembic import context

from kdskills.remote.journal.sql import VERSION_TABLE

context.configure(connection=context.config.attributes["connection"], version_table=VERSION_TABLE)
context.run_migrations()
