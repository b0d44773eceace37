"""Projects of the service: uploaded skills and their versions, which one is active, who changed what.

`service.Projects` is what others use. `records` speaks to the tables, `views` puts a project's skills under its
policy. Names come from their modules, so that a command line that needs one loads only that.
"""
