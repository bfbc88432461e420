/* feed_run FOLDER RANKS STEPS PORT NAME: a monitor over invented ranks, for the tests of the server. It prints the
 * address, has written STEPS steps by then, and ends when its standard input does. */
#include "monitor/feed.h"

#include "monitor/monitor.h"
#include "os/clock.h"
#include "os/folder.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(int argc, char **argv) {
  if (argc != 6) {
    return 2;
  }
  int ranks = atoi(argv[2]);
  long steps = atol(argv[3]);
  even_monitor_rank facts[FEED_MOST_RANKS];
  char devices[FEED_MOST_RANKS][16];
  uint32_t shares[FEED_MOST_RANKS];
  feed made;
  even_monitor *monitor = NULL;
  uint32_t batch = (uint32_t)ranks * 8;
  feed_open(&made, ranks, batch, even_clock_ns());
  for (int rank = 0; rank < ranks; rank++) {
    (void)snprintf(devices[rank], sizeof devices[rank], "cpu:%d", rank);
    facts[rank] = (even_monitor_rank){devices[rank], "Invented CPU", 1, rank == 1 ? 0.25 : NAN, NULL};
    made.speeds[rank] = rank == 1 ? 1000 : 4000;
    shares[rank] = 8;
  }
  const even_monitor_params params = {.size = sizeof params,
                                      .run_folder = argv[1],
                                      .run_name = argv[5],
                                      .command = "evenstep run <train.py>",
                                      .policy = "hybrid",
                                      .ranks = ranks,
                                      .rank_facts = facts,
                                      .telemetry_fd = made.fd,
                                      .port = atoi(argv[4])};
  int lock = -1;
  if (even_folder_lock(argv[1], &lock) != EVEN_OK || even_monitor_open(&params, &monitor) != EVEN_OK) {
    (void)fprintf(stderr, "%s\nfix: %s\n", even_error_last()->what, even_error_last()->fix);
    return even_status_exit_code(even_error_last()->status);
  }
  even_monitor_attempt(monitor, 0);
  for (int rank = 0; rank < ranks; rank++) {
    even_monitor_rank_started(monitor, rank, getpid());
  }
  feed_event(&made, 0, EVEN_EVENT_TOTAL_STEPS, steps + steps / 2, "");
  for (long step = 0; step < steps; step++) {
    if (step == 6 && ranks == 2) {
      shares[0] = 13;
      shares[1] = 3;
      feed_event(&made, 0, EVEN_EVENT_SHARES, 0, "13,3");
      feed_event(&made, 1, EVEN_EVENT_SHARES, 0, "13,3");
    }
    if (step % 100 == 99) {
      feed_event(&made, 0, EVEN_EVENT_CHECKPOINT, step, "step-000100</script>");
    }
    feed_step(&made, shares);
    if (step % 100 == 0 || step == steps - 1) {
      if (even_monitor_tick(monitor) != EVEN_OK) {
        (void)fprintf(stderr, "%s\n", even_error_last()->what);
      }
    }
  }
  (void)printf("%s\n", even_monitor_url(monitor));
  (void)fflush(stdout);
  while (getchar() != EOF) {
    /* a newline is a tick */
    if (even_monitor_tick(monitor) != EVEN_OK) {
      (void)fprintf(stderr, "%s\n", even_error_last()->what);
    }
  }
  even_status status = even_monitor_close(monitor, 0);
  if (status != EVEN_OK) {
    (void)fprintf(stderr, "%s\n", even_error_last()->what);
  }
  feed_close(&made);
  even_folder_unlock(lock);
  return even_status_exit_code(status);
}
