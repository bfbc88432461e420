/* The report of a run folder. */
#include "monitor/report.h"

even_status even_report_write_page(const char *folder) {
  (void)folder;
  return EVEN_OK;
}
