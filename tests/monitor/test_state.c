/* The state: means over the window, restarts, the course of long runs, events told by several ranks. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/json_reader.h"
#include "monitor/json.h"
#include "monitor/view.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static even_state *open_state(int ranks) {
  even_state *state = NULL;
  assert_int_equal(even_state_open(ranks, "run \"one\"", "evenstep run x.py", "hybrid", &state), EVEN_OK);
  state->started_ns = 1000000000;
  for (int rank = 0; rank < ranks; rank++) {
    even_state_rank_facts(state, rank, "cpu:0", "CPU", 1, NAN);
  }
  return state;
}

/* Step `step` of all ranks: 0.1 s each; rank 0 busy 0.1 s with 12 of 16 samples, the others 0.05 s with the rest. */
static void make_step(even_state *state, uint32_t step) {
  for (int rank = 0; rank < state->ranks; rank++) {
    const even_span_record span = {.step = step,
                                   .span = EVEN_SPAN_DATA,
                                   .start_ns = 1000000000 + step * UINT64_C(100000000),
                                   .duration_ns = 20000000};
    const even_step_record record = {.step = step,
                                     .end_ns = 1000000000 + (step + 1) * UINT64_C(100000000),
                                     .duration_ns = 100000000,
                                     .busy_ns = rank == 0 ? 100000000 : 50000000,
                                     .samples = rank == 0 ? 12 : 4,
                                     .batch = 16,
                                     .loss = (float)step,
                                     .predicted_seconds = NAN};
    even_state_span(state, rank, &span);
    even_state_step(state, rank, &record);
  }
}

static uint64_t after(uint32_t steps) {
  return 1000000000 + steps * UINT64_C(100000000);
}

static void the_window_measures(void **unused) {
  (void)unused;
  even_state *state = open_state(2);
  even_measure measure;
  even_state_measure(state, after(0), &measure);
  assert_int_equal(measure.phase, EVEN_PHASE_STARTING);
  assert_true(isnan(measure.samples_per_second));
  for (uint32_t step = 0; step < 30; step++) {
    make_step(state, step);
    even_state_measure(state, after(step + 1), &measure);
    assert_int_equal(measure.phase, step < 4 ? EVEN_PHASE_WARMING : EVEN_PHASE_TRAINING);
  }
  state->total = 130;
  even_state_measure(state, after(30), &measure);
  assert_int_equal(measure.step, 29);
  assert_float_equal(measure.samples_per_second, 160, 1e-9);
  assert_float_equal(measure.best_samples_per_second, 120 + 80, 1e-9);
  assert_float_equal(measure.efficiency, 0.8, 1e-9);
  assert_float_equal(measure.rank[1].wait_fraction, 0.5, 1e-9);
  assert_float_equal(measure.rank[0].spans[EVEN_SPAN_DATA], 0.02, 1e-9);
  assert_true(isnan(measure.rank[0].spans[EVEN_SPAN_CHECKPOINT]));
  assert_float_equal(measure.eta_seconds, 10, 1e-9);
  assert_float_equal(measure.loss, 29, 0);
  assert_int_equal(measure.samples_total, 30 * 16);
  even_state_measure(state, after(30) + UINT64_C(20000000000), &measure);
  assert_int_equal(measure.phase, EVEN_PHASE_STALLED);
  even_state_close(state);
}

static void one_rank_alone_says_nothing_yet(void **unused) {
  (void)unused;
  even_state *state = open_state(2);
  even_measure measure;
  state->ranks = 1;
  for (uint32_t step = 0; step < 30; step++) {
    make_step(state, step);
  }
  state->ranks = 2;
  even_state_measure(state, after(30), &measure);
  assert_int_equal(measure.phase, EVEN_PHASE_WARMING);
  even_state_close(state);
}

static void a_rank_that_is_ahead_does_not_blur_the_means(void **unused) {
  (void)unused;
  even_state *state = open_state(2);
  even_measure measure;
  for (uint32_t step = 0; step < 30; step++) {
    make_step(state, step);
  }
  state->ranks = 1; /* rank 0's ring was read, rank 1's not yet */
  for (uint32_t step = 30; step < 50; step++) {
    make_step(state, step);
  }
  state->ranks = 2;
  even_state_measure(state, after(50), &measure);
  assert_int_equal(measure.phase, EVEN_PHASE_TRAINING);
  assert_int_equal(measure.step, 49);
  assert_float_equal(measure.rank[1].wait_fraction, 0.5F, 1e-6F);
  assert_float_equal(measure.best_samples_per_second, 200, 1e-3F);
  assert_float_equal(measure.loss, 29, 0); /* of the last step that both have told of */
  even_state_close(state);
}

static json_t *parsed(even_text *text) {
  json_t *value = NULL;
  assert_int_equal(even_text_status(text), EVEN_OK);
  assert_int_equal(even_json_parse("test", even_text_string(text), text->length, &value), EVEN_OK);
  even_text_free(text);
  return value;
}

static json_t *steps_json(const even_state *state, long since, size_t limit) {
  even_text text = EVEN_TEXT_EMPTY;
  even_monitor_json_steps(state, since, limit, &text);
  return parsed(&text);
}

static void a_long_run_is_kept_whole_at_less_resolution(void **unused) {
  (void)unused;
  even_state *state = open_state(2);
  enum { STEPS = 100000 };
  for (uint32_t step = 0; step < STEPS; step++) {
    make_step(state, step);
  }
  json_t *all = steps_json(state, -1, 0);
  json_t *points = json_object_get(all, "points");
  assert_int_equal(json_integer_value(json_object_get(all, "stride")), 64);
  assert_int_equal(json_array_size(points), (STEPS + 63) / 64);
  json_t *last = json_array_get(points, json_array_size(points) - 1);
  assert_int_equal(json_integer_value(json_array_get(last, 0)), STEPS - 1);
  assert_float_equal(json_number_value(json_array_get(last, 3)), 160, 1e-3);
  assert_float_equal(json_number_value(json_array_get(json_array_get(last, 6), 0)), 12, 1e-9);
  assert_float_equal(json_number_value(json_array_get(json_array_get(last, 7), 1)), 0.5, 1e-9);
  json_decref(all);
  all = steps_json(state, -1, 110); /* 15 together would do; two runs' strides shall be multiples */
  assert_int_equal(json_array_size(json_object_get(all, "points")), 98); /* 1563 points, 16 together */
  assert_int_equal(json_integer_value(json_object_get(all, "stride")), 16 * 64);
  json_decref(all);
  all = steps_json(state, STEPS - 1, 110); /* nor another stride for what comes next */
  assert_int_equal(json_array_size(json_object_get(all, "points")), 1);
  assert_int_equal(json_integer_value(json_object_get(all, "stride")), 16 * 64);
  assert_int_equal(json_integer_value(json_array_get(json_array_get(json_object_get(all, "points"), 0), 0)), STEPS - 1);
  json_decref(all);
  all = steps_json(state, STEPS / 2, 110); /* its points are those of the whole course */
  assert_int_equal(json_array_size(json_object_get(all, "points")), 98 - STEPS / 2 / (16 * 64));
  json_decref(all);
  all = steps_json(state, STEPS - 1, 0); /* a client that has all gets the last again, it may have grown */
  assert_int_equal(json_array_size(json_object_get(all, "points")), 1);
  json_decref(all);
  all = steps_json(state, 4000000000L, 0); /* and one from another run nothing */
  assert_int_equal(json_array_size(json_object_get(all, "points")), 0);
  json_decref(all);
  even_state_close(state);
}

static void a_restart_takes_the_place_of_what_is_done_again(void **unused) {
  (void)unused;
  even_state *state = open_state(2);
  even_measure measure;
  for (uint32_t step = 0; step < 40; step++) {
    make_step(state, step);
  }
  uint64_t generation = state->generation;
  even_state_attempt(state, 1, after(45));
  even_state_measure(state, after(46), &measure);
  assert_int_equal(measure.phase, EVEN_PHASE_STARTING);
  even_step_record again = {.step = 30,
                            .end_ns = after(50),
                            .duration_ns = 200000000,
                            .busy_ns = 200000000,
                            .samples = 16,
                            .batch = 16,
                            .loss = NAN};
  even_state_step(state, 0, &again);
  even_state_measure(state, after(50), &measure);
  assert_int_equal(measure.step, 30);
  assert_int_equal(measure.phase, EVEN_PHASE_WARMING);
  assert_float_equal(measure.step_seconds, 0.2, 1e-9); /* nothing of the attempt before */
  assert_true(state->generation > generation);
  json_t *all = steps_json(state, -1, 0);
  assert_int_equal(json_array_size(json_object_get(all, "points")), 31);
  json_decref(all);
  even_state_close(state);
}

static void what_every_rank_says_is_kept_once(void **unused) {
  (void)unused;
  even_state *state = open_state(3);
  even_state_event event = {.event = EVEN_EVENT_SHARES, .step = 5, .words = "8,4,4"};
  for (int rank = 0; rank < 3; rank++) {
    event.rank = rank;
    assert_int_equal(even_state_event_add(state, &event), rank == 0);
  }
  event.step = 9;
  assert_true(even_state_event_add(state, &event));
  event.event = EVEN_EVENT_MESSAGE; /* two ranks may say the same and mean it */
  assert_true(even_state_event_add(state, &event));
  assert_true(even_state_event_add(state, &event));
  assert_int_equal(state->event_count, 4);
  for (int i = 0; i < 1000; i++) {
    assert_true(even_state_event_add(state, &event));
  }
  even_text text = EVEN_TEXT_EMPTY;
  even_monitor_json_events(state, 0, &text);
  json_t *events = parsed(&text);
  assert_int_equal(json_array_size(json_object_get(events, "events")), EVEN_STATE_EVENTS);
  assert_int_equal(json_integer_value(json_object_get(events, "last")), 1004);
  json_decref(events);
  even_state_close(state);
}

static void give_loss(even_state *state, int attempt, uint32_t step, double loss) {
  even_state_event event = {.event = EVEN_EVENT_SCALAR, .attempt = attempt, .step = step, .scalar = loss};
  (void)snprintf(event.words, sizeof event.words, "loss");
  assert_true(even_state_event_add(state, &event));
}

static double loss_of_point(const even_state *state, size_t index) {
  json_t *all = steps_json(state, -1, 0);
  const json_t *loss = json_array_get(json_array_get(json_object_get(all, "points"), index), 4);
  double value = json_is_null(loss) ? (double)NAN : json_number_value(loss);
  json_decref(all);
  return value;
}

/* A page that has points with the loss that backward began from fetches them anew. */
static void the_first_given_loss_changes_the_old_points(void **unused) {
  (void)unused;
  even_state *state = open_state(2);
  make_step(state, 0);
  make_step(state, 1);
  uint64_t generation = state->generation;
  assert_true(loss_of_point(state, 1) == 1);
  give_loss(state, 0, 1, 4);
  assert_true(state->generation > generation);
  assert_true(isnan(loss_of_point(state, 0)));
  generation = state->generation;
  make_step(state, 2);
  give_loss(state, 0, 2, 3);
  assert_int_equal(state->generation, generation);
  even_state_close(state);
}

static void a_given_loss_stands_in_the_course(void **unused) {
  (void)unused;
  even_state *state = open_state(2);
  even_measure measure;
  give_loss(state, 0, 0, 5.5); /* before its step */
  make_step(state, 0);
  make_step(state, 1);
  make_step(state, 2);
  give_loss(state, 0, 1, 4); /* after it */
  even_state_measure(state, after(3), &measure);
  assert_true(measure.loss == 4);
  assert_true(loss_of_point(state, 0) == 5.5);
  assert_true(loss_of_point(state, 1) == 4);
  assert_true(isnan(loss_of_point(state, 2))); /* what backward began from does not count any more */
  give_loss(state, 0, 4000000000U, 1);         /* damage */
  assert_int_equal(state->stride, 1);
  assert_int_equal(state->point_count, 3);
  even_state_attempt(state, 1, after(4));
  give_loss(state, 1, 1, 3.5); /* done again: the one before is forgotten */
  make_step(state, 1);
  assert_true(loss_of_point(state, 1) == 3.5);
  give_loss(state, 0, 1, 9); /* what is read late of the attempt before */
  assert_true(loss_of_point(state, 1) == 3.5);
  for (uint32_t step = 2; step < 5000; step++) {
    make_step(state, step);
  }
  assert_int_equal(state->stride, 4); /* merged, not lost */
  assert_true(loss_of_point(state, 0) == 4.5);
  even_state_close(state);
}

static void damage_does_not_ruin_the_course(void **unused) {
  (void)unused;
  even_state *state = open_state(1);
  make_step(state, 0);
  make_step(state, 1);
  const even_step_record wild = {.step = 4000000000U, .end_ns = after(2), .duration_ns = 1, .busy_ns = UINT64_MAX};
  even_state_step(state, 0, &wild);
  assert_int_equal(state->last_step, 1);
  assert_int_equal(state->stride, 1);
  even_state_close(state);
}

static void outputs_hold_for_no_steps_and_many_ranks(void **unused) {
  (void)unused;
  const int counts[] = {1, 64};
  for (size_t i = 0; i < 2; i++) {
    for (uint32_t steps = 0; steps < 12; steps += 11) {
      even_state *state = open_state(counts[i]);
      even_measure measure;
      even_text text = EVEN_TEXT_EMPTY;
      for (uint32_t step = 0; step < steps; step++) {
        make_step(state, step);
      }
      even_state_measure(state, after(steps), &measure);
      even_monitor_json_summary(state, &measure, &text);
      json_t *summary = parsed(&text);
      assert_string_equal(json_string_value(json_object_get(summary, "run")), "run \"one\"");
      assert_int_equal(json_array_size(json_object_get(summary, "ranks")), counts[i]);
      json_decref(summary);
      even_monitor_json_spans(state, &measure, &text);
      json_decref(parsed(&text));
      for (int columns = 1; columns < 200; columns += 33) {
        even_view_draw(state, after(steps), columns, false, &text);
        for (const char *line = even_text_string(&text); *line != '\0'; line = strchr(line, '\n') + 1) {
          assert_true(strcspn(line, "\n") <= (size_t)(columns < 20 ? 20 : columns) * 3); /* bytes of "█" */
        }
        even_text_clear(&text);
      }
      even_text_free(&text);
      even_state_close(state);
    }
  }
}

static void the_view_obeys_width_and_colour(void **unused) {
  (void)unused;
  assert_int_equal(setenv("LC_ALL", "C", 1), 0);
  even_state *state = open_state(2);
  even_text text = EVEN_TEXT_EMPTY;
  state->total = 100;
  for (uint32_t step = 0; step < 50; step++) {
    make_step(state, step);
  }
  even_view_draw(state, after(50), 40, false, &text);
  assert_null(strchr(even_text_string(&text), '\033'));
  assert_non_null(strstr(even_text_string(&text), "#################................."));
  assert_non_null(strstr(even_text_string(&text), " 50%"));
  for (const char *line = even_text_string(&text); *line != '\0'; line = strchr(line, '\n') + 1) {
    assert_true(strcspn(line, "\n") <= 40);
  }
  even_text_clear(&text);
  even_view_draw(state, after(50), 100, true, &text);
  assert_non_null(strstr(even_text_string(&text), "\033[32m"));
  assert_non_null(strstr(even_text_string(&text), "share   4.0  wait  50%"));
  even_text_free(&text);
  even_state_close(state);
}

static void ranks_of_several_hosts_stand_in_columns(void **unused) {
  (void)unused;
  even_state *state = open_state(2);
  even_text text = EVEN_TEXT_EMPTY;
  even_state_rank_facts(state, 1, "cpu:1 on there", "model", 1, NAN);
  make_step(state, 0);
  even_view_draw(state, after(1), 80, false, &text);
  const char *first = strstr(even_text_string(&text), "rank 0 ");
  const char *second = strstr(even_text_string(&text), "rank 1 ");
  assert_true(first != NULL && second != NULL);
  assert_int_equal(strstr(first, "share ") - first, strstr(second, "share ") - second);
  even_text_free(&text);
  even_state_close(state);
}

static void look_at_calls(even_state *state, uint64_t at_ns, uint64_t collectives, uint64_t bytes) {
  const even_call_totals totals = {.collectives = collectives,
                                   .bytes = bytes,
                                   .bus_bytes = bytes + bytes / 2,
                                   .ns = collectives * 10000000,
                                   .wait_ns = collectives * 4000000};
  even_state_calls_seen(state, 1, at_ns, &totals);
}

static void calls_of_the_last_second_are_measured(void **unused) {
  (void)unused;
  even_state *state = open_state(2);
  even_measure measure;
  even_text text = EVEN_TEXT_EMPTY;
  look_at_calls(state, after(10), 0, 0);
  even_state_measure(state, after(10), &measure);
  assert_true(isnan(measure.rank[1].collective_bytes_per_second) && isnan(measure.rank[0].bus_bandwidth));
  look_at_calls(state, after(20), 50, 30000000); /* 1 s later: 0.5 s inside, 0.2 s of it waiting */
  even_state_measure(state, after(20), &measure);
  assert_float_equal(measure.rank[1].collectives_per_second, 50, 1e-9);
  assert_float_equal(measure.rank[1].collective_bytes_per_second, 30e6, 1e-3);
  assert_float_equal(measure.rank[1].collective_fraction, 0.5, 1e-9);
  assert_float_equal(measure.rank[1].bus_bandwidth, 150e6, 1);
  make_step(state, 0);
  even_view_draw(state, after(20), 200, false, &text);
  assert_non_null(strstr(even_text_string(&text), "comm 30 MB/s, bus 150 MB/s"));
  look_at_calls(state, after(30), 50, 30000000); /* nothing since */
  even_state_measure(state, after(30), &measure);
  assert_true(isnan(measure.rank[1].bus_bandwidth));
  even_text_free(&text);
  even_state_close(state);
}

static void tell_stall(even_state *state, uint64_t at_ns) {
  even_state_event event = {.rank = 1, .at_ns = at_ns, .event = EVEN_EVENT_STALL};
  (void)snprintf(event.words, sizeof event.words, "rank 1 has waited 60 s for rank 0");
  assert_true(even_state_event_add(state, &event));
}

static void a_stall_is_shown_as_long_as_it_lasts(void **unused) {
  (void)unused;
  even_state *state = open_state(2);
  even_text text = EVEN_TEXT_EMPTY;
  look_at_calls(state, after(1), 7, 100);
  assert_false(even_state_stalls(state));
  tell_stall(state, after(2));
  look_at_calls(state, after(3), 8, 100); /* from before it */
  assert_true(even_state_stalls(state));
  even_view_draw(state, after(4), 80, false, &text);
  assert_non_null(strstr(even_text_string(&text), "a collective stands still: rank 1 has waited 60 s for rank 0"));
  look_at_calls(state, after(5), 8, 100);
  assert_true(even_state_stalls(state));
  look_at_calls(state, after(6), 9, 100);
  assert_false(even_state_stalls(state));
  tell_stall(state, after(7) + 1);
  assert_true(even_state_stalls(state));
  make_step(state, 6); /* ends at after(7) */
  assert_true(even_state_stalls(state));
  make_step(state, 7);
  assert_false(even_state_stalls(state));
  even_text_free(&text);
  even_state_close(state);
}

/* Rank 2 joins after ten steps, ranks 1 and 2 leave after twenty: the course keeps what each did. */
static void ranks_come_and_go(void **unused) {
  (void)unused;
  even_state *state = open_state(2);
  even_measure measure;
  for (uint32_t step = 0; step < 10; step++) {
    make_step(state, step);
  }
  uint64_t generation = state->generation;
  assert_int_equal(even_state_ranks(state, 3), EVEN_OK);
  assert_true(state->generation > generation);
  even_state_rank_facts(state, 2, "cpu on b", "CPU", 1, NAN);
  even_state_attempt(state, 1, after(10));
  for (uint32_t step = 10; step < 20; step++) {
    make_step(state, step);
  }
  even_state_measure(state, after(20), &measure);
  assert_int_equal(measure.ranks, 3);
  assert_int_equal(even_state_ranks(state, 1), EVEN_OK);
  even_state_attempt(state, 2, after(20));
  for (uint32_t step = 20; step < 30; step++) {
    make_step(state, step);
  }
  even_state_measure(state, after(30), &measure);
  assert_int_equal(measure.ranks, 1);
  for (size_t i = 0; i < 30; i++) {
    assert_int_equal(state->point_ranks[i * 3].samples, 12);
    assert_int_equal(state->point_ranks[i * 3 + 1].samples, i < 20 ? 4 : 0);
    assert_int_equal(state->point_ranks[i * 3 + 2].samples, i >= 10 && i < 20 ? 4 : 0);
  }
  assert_int_equal(even_state_ranks(state, 0), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_state_ranks(state, EVEN_STATE_MOST_RANKS + 1), EVEN_ERR_ARGUMENT);
  assert_int_equal(state->ranks, 1);
  even_state_close(state);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(the_window_measures),
      cmocka_unit_test(ranks_come_and_go),
      cmocka_unit_test(a_rank_that_is_ahead_does_not_blur_the_means),
      cmocka_unit_test(one_rank_alone_says_nothing_yet),
      cmocka_unit_test(a_long_run_is_kept_whole_at_less_resolution),
      cmocka_unit_test(a_restart_takes_the_place_of_what_is_done_again),
      cmocka_unit_test(what_every_rank_says_is_kept_once),
      cmocka_unit_test(a_given_loss_stands_in_the_course),
      cmocka_unit_test(the_first_given_loss_changes_the_old_points),
      cmocka_unit_test(damage_does_not_ruin_the_course),
      cmocka_unit_test(calls_of_the_last_second_are_measured),
      cmocka_unit_test(a_stall_is_shown_as_long_as_it_lasts),
      cmocka_unit_test(outputs_hold_for_no_steps_and_many_ranks),
      cmocka_unit_test(the_view_obeys_width_and_colour),
      cmocka_unit_test(ranks_of_several_hosts_stand_in_columns),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
