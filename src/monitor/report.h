/* The report of a run folder: its numbers, the page with the data inside, the terminal's table. */
#ifndef EVEN_MONITOR_REPORT_H
#define EVEN_MONITOR_REPORT_H

#include "base/text.h"

/* Writes FOLDER/report.html from FOLDER/run.db. */
even_status even_report_write_page(const char *folder) EVEN_MUST_USE;

#endif
