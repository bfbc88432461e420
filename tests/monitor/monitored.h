/* A monitored run of two invented ranks in a folder of its own, without a server. */
#ifndef EVEN_TEST_MONITORED_H
#define EVEN_TEST_MONITORED_H

#include "base/json_reader.h"
#include "monitor/feed.h"
#include "monitor/monitor.h"

typedef struct monitored {
  char folder[64];
  feed ranks;
  even_monitor *monitor;
  int lock;                /* of the folder */
  long long step_rows;     /* for the monitor */
  const char *const *gpus; /* the same, as even_monitor_params has them */
  const char *nvml_library;
  even_monitor_limits limits; /* the same */
  void (*notice)(void *context, const char *text);
  bool continues; /* the same */
  long long calls;
} monitored;

/* For cmocka; the folder is gone afterwards. Rank 0 makes 4000 samples a second, rank 1 1000, a batch has 16. */
int monitored_set_up(void **state);
int monitored_tear_down(void **state);
/* FOLDER/name, until the next call. */
const char *monitored_path(const monitored *made, const char *name);
even_status monitored_open(monitored *made, int port);
/* Opens the monitor and tells it of both ranks. */
void monitored_start(monitored *made);
/* Opens it as an agent does that goes on with another one's ranks, or begins; in that attempt, whose ranks are
 * processes MONITORED_PID and the next. */
enum { MONITORED_PID = 3999001 };
void monitored_begin(monitored *made, bool continues, int attempt);
/* As SIGKILL leaves it: what was not committed is not in the history. */
void monitored_kill(monitored *made);
/* Steps of both ranks, and a tick. */
void monitored_steps(monitored *made, int count, uint32_t first_share);
/* A tick that commits the batch, or tries to: as if a second had passed. */
even_status monitored_commit(monitored *made);
/* The same, where it must succeed. */
void monitored_committed(monitored *made);
/* The number that a query over run.db comes to; NAN for NULL. */
double monitored_number(const monitored *made, const char *query);
/* Whether the report has these words among its lines. */
void monitored_report_says(const monitored *made, const char *words, bool said);
/* The monitor that is opened next tells the test what it tells the terminal. */
void monitored_listen(monitored *made);
/* What it told since then: "text|text|". */
const char *monitored_heard(void);
/* Whether that has these words. */
void monitored_expect_heard(const char *words, bool said);
/* Writes FOLDER/name. */
void monitored_put(const monitored *made, const char *name, const char *content);
/* The data in report.html; nothing in them can end their script element. */
json_t *monitored_page(const monitored *made);

#endif
