#include "announcer_scene.h"

#include "base/fail.h"
#include "support/fault.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { TURN_MS = 1 };

static void keep(void *context, const char *words) {
  announcer_scene *at = context;
  size_t used = strlen(at->told);
  (void)snprintf(at->told + used, sizeof at->told - used, "%s|", words);
  at->tellings++;
}

static void keep_session(void *context, pid_t leader, bool begins) {
  announcer_scene *at = context;
  assert_true(leader > 1);
  assert_int_equal(at->session, begins ? 0 : leader);
  at->session = begins ? leader : 0;
}

int announcer_scene_open(void **state) {
  announcer_scene *at = calloc(1, sizeof *at);
  assert_non_null(at);
  metadata_service_open(&at->service);
  assert_int_equal(even_loop_open(&at->loop), EVEN_OK);
  *state = at;
  return 0;
}

int announcer_scene_close(void **state) {
  announcer_scene *at = *state;
  fault_reset();
  even_announcer_close(at->announcer);
  even_loop_close(&at->loop);
  metadata_service_close(&at->service);
  free(at);
  return 0;
}

/* `service`: "aws"; it is asked where the test plays it. */
even_status announcer_scene_ask(announcer_scene *at, const char *service) {
  (void)snprintf(at->place, sizeof at->place, "%s=127.0.0.1:%d", service, at->service.port);
  const even_announcer_params params = {
      .place = at->place, .loop = &at->loop, .seconds = 77, .every_seconds = 0.001, .tell = keep, .context = at};
  return even_announcer_open(&params, &at->announcer);
}

even_status announcer_scene_ask_place(announcer_scene *at, const char *place) {
  const even_announcer_params params = {.place = place,
                                        .loop = &at->loop,
                                        .seconds = 77,
                                        .every_seconds = 0.001,
                                        .tell = keep,
                                        .session = keep_session,
                                        .context = at};
  at->ended = 0;
  return even_announcer_open(&params, &at->announcer);
}

void announcer_scene_reap(announcer_scene *at) {
  even_process_end end;
  bool any = true;
  while (any && even_process_reap(&end, &any) == EVEN_OK && any) {
    at->ended += even_announcer_took_end(at->announcer, &end) ? 1 : 0;
  }
  even_error_clear();
}

bool announcer_scene_turn(announcer_scene *at) {
  (void)!even_loop_turn(&at->loop, TURN_MS); /* a fault may be meant for it */
  even_announcer_tick(at->announcer);
  metadata_service_turn(&at->service);
  announcer_scene_reap(at);
  return even_announcer_due(at->announcer, &at->seconds, at->what);
}

/* Whether the end is announced within many turns. */
bool announcer_scene_is_due(announcer_scene *at) {
  bool due = false;
  for (int i = 0; i < ANNOUNCER_SCENE_TURNS && !due; i++) {
    due = announcer_scene_turn(at);
  }
  return due;
}

even_status announcer_scene_finish(announcer_scene *at, even_status asked) {
  even_status status = asked;
  if (status == EVEN_OK) {
    status = announcer_scene_is_due(at) ? EVEN_OK : even_fail(EVEN_ERR_TIMEOUT, "no end was found");
  }
  even_announcer_close(at->announcer);
  at->announcer = NULL;
  return status;
}

void announcer_scene_until_told(announcer_scene *at, int tellings) {
  for (int i = 0; i < ANNOUNCER_SCENE_TURNS && at->tellings < tellings; i++) {
    assert_false(announcer_scene_turn(at));
  }
  assert_int_equal(at->tellings, tellings);
}

/* None of them is notice. */
void announcer_scene_until_ended(announcer_scene *at, int commands) {
  for (int i = 0; i < ANNOUNCER_SCENE_TURNS && at->ended < commands; i++) {
    assert_false(announcer_scene_turn(at));
  }
  assert_true(at->ended >= commands);
}
