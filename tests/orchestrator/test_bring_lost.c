/* Copies that come back where a host has none any more, or does not come to the end of what it gets. */
#include "base/json_reader.h"
#include "checkpoint/manifest_writer.h"
#include "checkpoint/reader.h"
#include "checkpoint/scratch.h"
#include "orchestrator/bring.h"
#include "orchestrator/bring_scene.h"
#include "orchestrator/copies.h"
#include "orchestrator/remote.h"
#include "orchestrator/resume.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/signals.h"
#include "support/clock_ahead.h"

#include <inttypes.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

/* With each turn of the leader's loop. */
static void turn_with(even_loop_watch *watch, int ends[2], void (*ready)(void *context, int fd)) {
  assert_int_equal(pipe(ends), 0);
  assert_int_equal(write(ends[1], "x", 1), 1);
  assert_int_equal(even_loop_add(&at.hosts.loop, watch, ends[0], ready, NULL), EVEN_OK);
}

static void turn_without(even_loop_watch *watch, int ends[2]) {
  even_loop_remove(&at.hosts.loop, watch);
  (void)close(ends[0]);
  (void)close(ends[1]);
}

/* The hosts here take no copy: what is on its way there does not come to its end. */
static void a_copy_that_does_not_come_to_its_end_is_not_waited_for_without_end(void **state) {
  (void)state;
  const even_bring_back_wish wish = bring_scene_wish();
  char *path = NULL;
  bring_scene_save(at.folder, 3);
  at.job.alive = 1;
  even_copies_tick(&at.job);
  assert_non_null(even_copies_coming(at.hosts.copies));
  at.job.alive = 0;
  bring_scene_save(at.folder, 2);
  bring_scene_read_order(at.folder, 2, at.after);
  bring_scene_assert_brings(&wish, NULL);
  assert_true(bring_scene_was_told(
      "warning: host host1 may have a newer checkpoint than this one, but what was on its way there "
      "has not come to its end within 300 s"));
  assert_int_equal(even_checkpoint_remove(scratch_path("leader/step-3")), EVEN_OK);
  at.after[0] = '\0';
  assert_int_equal(bring_scene_look(&wish, &path), EVEN_ERR_PEER_LOST);
  assert_non_null(strstr(even_error_last()->what, "has not come to its end within 300 s: its disk may hang"));
  bring_scene_save(at.sides[1].disk, 3); /* it has, but does not say it */
  bring_scene_assert_brings(&wish, scratch_path("leader/step-3"));
  for (size_t i = 1; i < STAR_HOSTS; i++) {
    even_bring_drop(&at.agents[i]);
  }
}

/* Nor is one that gets what a restart begins from: it is lost, as one that stands still. */
static void a_host_that_does_not_write_what_it_gets_is_given_up(void **state) {
  (void)state;
  bring_scene_save(at.folder, 3);
  even_text_add(&at.job.resume, scratch_path("leader/step-3"));
  const uint64_t began_ns = even_clock_ns();
  assert_int_equal(even_bring_to_all(&at.job), EVEN_ERR_PEER_LOST);
  assert_in_range(even_clock_ns() - began_ns, EVEN_BRING_WRITING_NS, EVEN_BRING_WRITING_NS + 60 * UINT64_C(1000000000));
  assert_non_null(strstr(even_error_last()->what,
                         "host host1 is lost: what was sent there of step-3 has not come to its end within 300 s: its "
                         "disk may hang"));
  assert_int_equal(even_bring_to_those_here(&at.job), EVEN_OK); /* nobody is, by now */
  for (size_t i = 1; i < STAR_HOSTS; i++) {
    assert_null(at.agents[i].link);
    even_bring_drop(&at.agents[i]);
  }
  even_text_free(&at.job.resume);
}

static even_link silent[STAR_HOSTS]; /* what goes out there nobody hears */
static int come;                     /* agents, where they were lost */

/* In each turn time passes; a connection that was given up ends, and an agent that is awaited comes. */
static void hang(void *context, int fd) {
  (void)context;
  (void)fd;
  clock_ahead_add(20 * UINT64_C(1000000000));
  for (size_t i = 1; i < STAR_HOSTS; i++) {
    even_host_agent *agent = &at.agents[i];
    if (agent->link != NULL && agent->link->failed) {
      (void)snprintf(agent->lost_words, sizeof agent->lost_words, "%.300s", even_link_why(agent->link)->what);
      agent->link = NULL;
      agent->lost = true;
      agent->fits = false;
    } else if (agent->link == NULL && !agent->lost) {
      silent[i] = (even_link){.fd = -1};
      agent->link = &silent[i];
      agent->fits = true;
      come++;
    }
  }
}

/* Its agent is started again, once. */
static void a_disk_that_hangs_is_tried_twice(void **state) {
  even_loop_watch watch = {.fd = -1};
  int ends[2];
  (void)state;
  come = 0;
  for (size_t i = 1; i < STAR_HOSTS; i++) {
    silent[i] = (even_link){.fd = -1};
    at.agents[i].link = &silent[i];
  }
  at.hosts.params.returns = true;
  at.hosts.params.patience_seconds = 120;
  bring_scene_save(at.folder, 3);
  even_text_add(&at.job.resume, scratch_path("leader/step-3"));
  turn_with(&watch, ends, hang);
  assert_int_equal(even_job_hosts_begin(&at.job), EVEN_ERR_PEER_LOST);
  assert_int_equal(come, STAR_HOSTS - 1);
  assert_non_null(strstr(even_error_last()->what, "host host1 is lost: what was sent there of step-3 has not come"));
  assert_non_null(strstr(even_error_last()->fix, "look at the disk there"));
  turn_without(&watch, ends);
  for (size_t i = 1; i < STAR_HOSTS; i++) {
    even_bring_drop(&at.agents[i]);
  }
  even_text_free(&at.job.resume);
}

/* The digits behind `name`, once, and the rest. */
static const char *replace_number(const char *text, const char *name, uint64_t number, even_text *out) {
  const char *found = strstr(text, name);
  assert_non_null(found);
  found += strlen(name);
  even_text_append(out, text, (size_t)(found - text));
  even_text_format(out, "%llu", (unsigned long long)number);
  return found + strspn(found, "0123456789");
}

/* As its manifest has it: one file, of one chunk. What is sent is not looked at before. */
static void claim_bytes(const char *manifest, uint64_t bytes) {
  even_text before = EVEN_TEXT_EMPTY;
  even_text after = EVEN_TEXT_EMPTY;
  assert_int_equal(even_file_read(manifest, 1 << 20, &before), EVEN_OK);
  const char *rest = replace_number(even_text_string(&before), "\"bytes\": ", bytes, &after);
  rest = replace_number(rest, "\"chunk_bytes\": ", bytes, &after);
  const char *tail = strstr(rest, EVEN_MANIFEST_TAIL);
  assert_non_null(tail);
  even_text_append(&after, rest, (size_t)(tail - rest));
  uint64_t sum = even_checkpoint_checksum(after.data, after.length);
  even_text_format(&after, "%s%016" PRIx64 "%s", EVEN_MANIFEST_TAIL, sum, EVEN_MANIFEST_END);
  assert_int_equal(even_text_status(&after), EVEN_OK);
  FILE *file = fopen(manifest, "w");
  assert_non_null(file);
  assert_int_equal(fwrite(after.data, 1, after.length, file), after.length);
  assert_int_equal(fclose(file), 0);
  even_text_free(&before);
  even_text_free(&after);
}

/* Else each that takes longer than five minutes to sync what it has got would be lost, again and again. */
static void a_host_has_the_longer_the_more_it_is_to_write(void **state) {
  static const struct {
    uint64_t bytes;
    uint64_t seconds;
    const char *words;
  } cases[] = {{63999999, 300, "within 300 s: "},
               {64000000, 301, "within 301 s: "},
               {UINT64_C(64000000000), 1300, "within 1300 s: "},
               {UINT64_C(640000000000), 10300, "within 10300 s: "}};
  (void)state;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    bring_scene_save(at.folder, 3);
    claim_bytes(scratch_path("leader/step-3/manifest.json"), cases[i].bytes);
    even_text_add(&at.job.resume, scratch_path("leader/step-3"));
    const uint64_t began_ns = even_clock_ns();
    assert_int_equal(even_bring_to_all(&at.job), EVEN_ERR_PEER_LOST);
    assert_in_range(even_clock_ns() - began_ns, cases[i].seconds * UINT64_C(1000000000),
                    (cases[i].seconds + 60) * UINT64_C(1000000000));
    assert_non_null(strstr(even_error_last()->what, cases[i].words));
    even_text_free(&at.job.resume);
    for (size_t host = 1; host < STAR_HOSTS; host++) {
      even_bring_drop(&at.agents[host]);
    }
    assert_int_equal(even_checkpoint_remove(scratch_path("leader/step-3")), EVEN_OK);
    bring_scene_begin_anew();
  }
}

/* The agent has sent step-3 to host 2, and, or, to host 1, and another one goes on from what it knew. */
static void have_sent(bool to_both) {
  even_copies_left left = {.held[0] = {.host = "host2", .order = "1"}};
  (void)snprintf(left.held[0].folder, sizeof left.held[0].folder, "%s", scratch_path("disk2/step-3"));
  if (to_both) {
    left.held[1] = (even_copies_left_copy){.host = "host1", .order = "1"};
    (void)snprintf(left.held[1].folder, sizeof left.held[1].folder, "%s", scratch_path("disk1/step-3"));
  }
  assert_int_equal(even_copies_take(&at.job, &left), EVEN_OK);
}

/* It would be missed for ever. */
static void a_copy_that_its_host_has_no_more_does_not_end_the_job(void **state) {
  (void)state;
  have_sent(false);
  at.sides[2].deaf = true; /* it says nothing of it */
  assert_int_equal(even_job_find_resume(&at.job, true), EVEN_ERR_PEER_LOST);
  at.sides[2].deaf = false;
  assert_int_equal(mkdir(scratch_path("disk2"), 0700), 0);
  assert_int_equal(mkdir(scratch_path("disk2/step-3"), 0700), 0); /* something of it is left */
  assert_int_equal(even_job_find_resume(&at.job, true), EVEN_ERR_NOT_FOUND);
  assert_int_equal(rmdir(scratch_path("disk2/step-3")), 0);
  assert_int_equal(even_job_find_resume(&at.job, true), EVEN_OK);
  assert_int_equal(at.job.resume.length, 0);
  assert_true(bring_scene_was_told("warning: host host2 had a copy of step-3 ("));
  assert_null(even_copies_newest(&at.job));
}

/* Nor of two: as long as one that is lost, or a host that says nothing, may have its own the job is not begun anew. */
static void copies_that_all_hosts_have_no_more_do_not_end_the_job(void **state) {
  (void)state;
  at.hosts.params.copies = 2;
  have_sent(true);
  even_link *link = at.agents[2].link;
  at.agents[2].link = NULL; /* lost before it was asked */
  assert_int_equal(even_job_find_resume(&at.job, true), EVEN_ERR_NOT_FOUND);
  assert_non_null(strstr(even_error_last()->what, "for host host2 has a copy of step-3"));
  assert_true(bring_scene_was_told("warning: host host1 had a copy of step-3 (")); /* it said so */
  assert_false(bring_scene_was_told("warning: host host2"));
  at.agents[2].link = link;
  assert_int_equal(even_job_find_resume(&at.job, true), EVEN_OK);
  assert_int_equal(at.job.resume.length, 0);
  assert_true(bring_scene_was_told("warning: host host2 had a copy of step-3 ("));
}

/* Whoever leads next knows it as soon as it is there. */
static void a_copy_that_has_come_is_left_to_the_other_hosts(void **state) {
  even_device devices[] = {{.name = "cpu:0"}};
  const even_device_list list = {devices, 1};
  char said[256];
  (void)state;
  at.params.devices = &list;
  at.hosts.params.memory_copies = 0;
  at.job.alive = 1;
  bring_scene_save(at.folder, 3);
  even_copies_tick(&at.job); /* it is on its way */
  (void)snprintf(said, sizeof said, "{\"serial\":%llu,\"holds\":true,\"folder\":\"%s\",\"came\":true}",
                 (unsigned long long)at.hosts.brought, scratch_path("disk1/step-3"));
  json_t *content = json_loads(said, 0, NULL);
  assert_int_equal(even_bring_hear(&at.agents[1], content), EVEN_OK);
  json_decref(content);
  at.hosts.voter = (void *)&at; /* it is asked nothing */
  even_copies_tick(&at.job);
  at.hosts.voter = NULL;
  for (uint64_t since = even_clock_ns(); at.sides[2].estate.length == 0 && even_clock_ns() - since < 10000000000U;) {
    assert_int_equal(even_loop_turn(&at.hosts.loop, 10), EVEN_OK);
  }
  json_t *estate = json_loads(even_text_string(&at.sides[2].estate), 0, NULL);
  const json_t *copy = json_array_get(json_object_get(estate, "copies"), 0);
  assert_string_equal(even_json_text(copy, "host"), "host1");
  assert_string_equal(even_json_text(copy, "folder"), scratch_path("disk1/step-3"));
  json_decref(estate);
  for (size_t i = 1; i < STAR_HOSTS; i++) {
    even_bring_drop(&at.agents[i]);
  }
}

/* It will go; those that are no newer than what is gone on from stay, and are known. */
static void only_copies_that_are_newer_are_given_up(void **state) {
  (void)state;
  even_copies_left left = {.held = {{.host = "host1"}, {.host = "host2"}}};
  at.hosts.params.copies = 2;
  bring_scene_save(at.folder, 2);
  bring_scene_save(at.sides[1].disk, 1);
  bring_scene_save(at.sides[2].disk, 3);
  for (size_t i = 0; i < 2; i++) {
    even_copies_left_copy *copy = &left.held[i];
    char order[64];
    (void)snprintf(copy->folder, sizeof copy->folder, "%s/step-%zu", at.sides[i + 1].disk, 2 * i + 1);
    bring_scene_read_order(at.sides[i + 1].disk, 2 * (int)i + 1, order);
    (void)snprintf(copy->order, sizeof copy->order, "%s", order);
  }
  assert_int_equal(even_copies_take(&at.job, &left), EVEN_OK);
  at.agents[2].link = NULL; /* it is lost */
  assert_int_equal(even_job_find_resume(&at.job, true), EVEN_OK);
  assert_string_equal(at.job.resume.data, scratch_path("leader/step-2"));
  assert_true(bring_scene_was_told("warning: host host2 has a copy of step-3"));
  assert_false(bring_scene_was_told("host1"));
  assert_null(even_copies_of(&at.job, "host2"));
  assert_non_null(even_copies_of(&at.job, "host1"));
  even_text_free(&at.job.resume);
}

/* ---- a host that is lost, and has a copy ---- */

static even_link *gone; /* the link of host 2; NULL: it does not come back */

/* In each turn once its agent is awaited: it comes, or time passes. */
static void turns(void *context, int fd) {
  (void)context;
  (void)fd;
  if (at.agents[2].lost) {
    return;
  }
  if (gone != NULL) {
    at.agents[2].link = gone;
    at.agents[2].fits = true;
  } else {
    clock_ahead_add(20 * UINT64_C(1000000000));
  }
}

static void lose_host_2(even_loop_watch *watch, int ends[2]) {
  gone = at.agents[2].link;
  at.agents[2].link = NULL;
  at.agents[2].fits = false;
  at.agents[2].lost = true;
  (void)snprintf(at.agents[2].lost_words, sizeof at.agents[2].lost_words, "it is off");
  at.hosts.params.returns = true;
  at.hosts.params.patience_seconds = 120;
  turn_with(watch, ends, turns);
}

/* The restart starts its agent again in any case: it does so before the job ends, or begins anew, for want of it. */
static void a_lost_host_with_the_only_copy_is_waited_for(void **state) {
  even_loop_watch watch = {.fd = -1};
  int ends[2];
  (void)state;
  have_sent(false);
  bring_scene_save(at.sides[2].disk, 3);
  lose_host_2(&watch, ends);
  assert_int_equal(even_job_find_resume(&at.job, true), EVEN_OK);
  assert_string_equal(at.job.resume.data, scratch_path("leader/step-3"));
  assert_true(
      bring_scene_was_told("host host2, which is lost (it is off), has a copy: it is waited for (up to 120 s, "
                           "EVENSTEP_HOSTS_PATIENCE)"));
  even_text_free(&at.job.resume);
  turn_without(&watch, ends);
}

/* Those that are here have one that is damaged: it is brought, and told, once. */
static void a_lost_host_is_waited_for_where_nothing_else_is_whole(void **state) {
  even_loop_watch watch = {.fd = -1};
  int ends[2];
  (void)state;
  have_sent(false);
  bring_scene_save(at.sides[2].disk, 3);
  bring_scene_save(at.sides[1].disk, 4);
  scratch_flip("disk1/step-4/model.safetensors", scratch_size("disk1/step-4/model.safetensors") - 1, 0);
  lose_host_2(&watch, ends);
  assert_int_equal(even_job_find_resume(&at.job, true), EVEN_OK);
  assert_string_equal(at.job.resume.data, scratch_path("leader/step-3"));
  const char *told = strstr(at.notices, "warning: step-4 could not be brought back from host host1");
  assert_non_null(told);
  assert_null(strstr(told + 1, "warning: step-4 could not"));
  even_text_free(&at.job.resume);
  turn_without(&watch, ends);
}

static void a_lost_host_that_does_not_come_is_named(void **state) {
  even_loop_watch watch = {.fd = -1};
  int ends[2];
  (void)state;
  have_sent(false);
  lose_host_2(&watch, ends);
  even_link *link = gone;
  gone = NULL;
  assert_int_equal(even_job_find_resume(&at.job, true), EVEN_ERR_NOT_FOUND);
  assert_non_null(strstr(even_error_last()->what, "for host host2 has a copy of step-3"));
  assert_true(
      bring_scene_was_told("host host2 does not come back: host host2: its agent did not come here within 120 s"));
  assert_true(at.agents[2].lost);
  at.notices[0] = '\0';
  bring_scene_save(at.folder, 2); /* something is here: */
  assert_int_equal(even_job_find_resume(&at.job, true), EVEN_OK);
  assert_true(bring_scene_was_told("warning: host host2 has a copy of step-3"));
  assert_false(bring_scene_was_told("waited for"));
  even_text_free(&at.job.resume);
  at.agents[2].link = link;
  turn_without(&watch, ends);
}

int main(void) {
#define LOST_TEST(name) cmocka_unit_test_setup_teardown(name, bring_scene_set_up, bring_scene_tear_down)
  const struct CMUnitTest tests[] = {
      LOST_TEST(a_copy_that_its_host_has_no_more_does_not_end_the_job),
      LOST_TEST(copies_that_all_hosts_have_no_more_do_not_end_the_job),
      LOST_TEST(a_copy_that_does_not_come_to_its_end_is_not_waited_for_without_end),
      LOST_TEST(a_host_that_does_not_write_what_it_gets_is_given_up),
      LOST_TEST(a_disk_that_hangs_is_tried_twice),
      LOST_TEST(a_host_has_the_longer_the_more_it_is_to_write),
      LOST_TEST(only_copies_that_are_newer_are_given_up),
      LOST_TEST(a_copy_that_has_come_is_left_to_the_other_hosts),
      LOST_TEST(a_lost_host_with_the_only_copy_is_waited_for),
      LOST_TEST(a_lost_host_is_waited_for_where_nothing_else_is_whole),
      LOST_TEST(a_lost_host_that_does_not_come_is_named),
  };
  struct sigaction pipe_before; /* as agents have it */
  if (even_signals_pipe_ignore(&pipe_before) != EVEN_OK) {
    return 1;
  }
  return cmocka_run_group_tests(tests, NULL, NULL);
}
