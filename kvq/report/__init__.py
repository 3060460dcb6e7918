"""Tables as pure functions of the records under results/."""

from kvq.report.tables.build import build_tables
from kvq.report.tables.layout import Planned, Row, Table, Tables
from kvq.report.tables.terminal import print_table, print_tables
from kvq.report.tables.write import write_tables

__all__ = ["Planned", "Row", "Table", "Tables", "build_tables", "print_table", "print_tables", "write_tables"]
