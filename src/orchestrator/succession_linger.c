/* A leader that has ended its job, which it had taken over, and a host that may not have heard of it: the old leader's,
 * that is cut off, where somebody may still look at a terminal; or one whose agent waits for a leader. Of the others
 * nobody is left that could tell it. Both wait for as long as for a majority. One may have been cut off so lately that
 * nobody knows it yet: then its host does not confirm that it got the word. One that has ended by itself, or was
 * killed, hears nothing any more, and is none of these (voter_links.h): its host says so at once. */
#include "orchestrator/succession_linger.h"

#include "base/stop.h"
#include "orchestrator/succession.h"
#include "os/clock.h"

#include <stdio.h>

static const uint64_t TOLD_NS = 1000000000u;
static const uint64_t QUIET_NS = 3000000000u; /* by then who can be reached has been, and is not worth a line */

static void tell(const even_hosts *hosts, const even_voter_view *view, uint64_t left_ns) {
  char words[300];
  (void)snprintf(words, sizeof words,
                 "the job has ended; this process stays until %.63s, which is cut off, has heard of it, at most %.0f s "
                 "(EVENSTEP_MAJORITY_PATIENCE; SIGTERM ends it now)",
                 view->missing[0] == '\0' ? "another host" : view->missing, (double)left_ns * 1e-9);
  even_estate_note(hosts->params.estate->content, words);
}

uint64_t even_succession_linger_until(const even_voter_view *view, uint64_t begun_ns, uint64_t patience_ns) {
  uint64_t untold = view->untold ? begun_ns + patience_ns : 0;
  uint64_t missing = view->missing_ns != 0 ? view->missing_ns + patience_ns : 0;
  return untold > missing ? untold : missing;
}

void even_succession_linger(even_hosts *hosts) {
  const uint64_t begun = even_clock_ns();
  bool told = false;
  bool cut = false;
  even_voter_view view;
  if (hosts->voter == NULL || hosts->params.estate == NULL) {
    return;
  }
  even_voter_look(hosts->voter, &view);
  if (!even_leadership_ended(&view.newest)) {
    return;
  }
  const uint64_t patience = (uint64_t)(hosts->params.majority_seconds * 1e9);
  uint64_t now = begun;
  uint64_t until = even_succession_linger_until(&view, begun, patience);
  while (now < until && !even_stop_asked()) {
    bool missed = view.missing_ns != 0 && !view.missing_closed;
    cut = cut || missed;
    if (now - begun > QUIET_NS && missed && !told) {
      tell(hosts, &view, until - now);
      told = true;
    }
    even_clock_sleep_ns(50000000);
    even_voter_look(hosts->voter, &view);
    now = even_clock_ns();
    until = even_succession_linger_until(&view, begun, patience);
  }
  until = even_clock_ns() + TOLD_NS;
  while (cut && view.missing_ns == 0 && even_clock_ns() < until && !even_stop_asked()) {
    even_clock_sleep_ns(50000000); /* it is here again: that its word goes out */
    even_voter_look(hosts->voter, &view);
  }
}
