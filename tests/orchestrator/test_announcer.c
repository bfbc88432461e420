/* Who asks for a machine's end, and what it makes of services that answer well, badly, or not: the test plays them.
 * Time passes by clocks that are ahead, not by waiting. */
#include "announcer_scene.h"
#include "os/clock.h"
#include "support/clock_ahead.h"
#include "support/descriptors.h"
#include "support/fault.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

enum { SOME_TURNS = 60 };

static const uint64_t SECOND_NS = 1000000000u;

/* Until `count` requests that begin so have come; none of the turns finds an end. */
static void turn_until(announcer_scene *at, const char *beginning, int count) {
  for (int i = 0; i < ANNOUNCER_SCENE_TURNS && metadata_service_count(&at->service, beginning) < count; i++) {
    assert_false(announcer_scene_turn(at));
  }
  assert_true(metadata_service_count(&at->service, beginning) >= count);
}

static void play(announcer_scene *at, size_t line, const char *beginning, const char *header, int status,
                 const char *headers, const char *body) {
  metadata_line *one = &at->service.lines[line];
  *one = (metadata_line){.beginning = beginning, .header = header, .status = status, .headers = headers};
  (void)snprintf(one->body, sizeof one->body, "%s", body);
}

#define TOKEN_LINE "PUT /latest/api/token HTTP/1.1\r\n"
#define ACTION_LINE "GET /latest/meta-data/spot/instance-action HTTP/1.1\r\n"
#define REBALANCE_LINE "GET /latest/meta-data/events/recommendations/rebalance HTTP/1.1\r\n"
#define PREEMPTED_LINE "GET /computeMetadata/v1/instance/preempted HTTP/1.1\r\n"
#define NAME_LINE "GET /metadata/instance/compute/name?api-version=2021-02-01&format=text HTTP/1.1\r\n"
#define MACHINE_LINE "GET /metadata/instance/compute/vmId?api-version=2021-02-01&format=text HTTP/1.1\r\n"
#define EVENTS_LINE "GET /metadata/scheduledevents?api-version=2020-07-01 HTTP/1.1\r\n"

static void play_token(announcer_scene *at) {
  play(at, 0, TOKEN_LINE, "\r\nX-aws-ec2-metadata-token-ttl-seconds: 21600\r\n", 200,
       "X-Aws-Ec2-Metadata-Token-Ttl-Seconds: 21600\r\n", "tok-en==");
}

static void write_time(char out[64], const char *format, int64_t seconds_from_now) {
  time_t at = (time_t)(even_clock_wall_ns() / SECOND_NS) + (time_t)seconds_from_now;
  struct tm parts;
  assert_non_null(gmtime_r(&at, &parts));
  assert_true(strftime(out, 64, format, &parts) > 0);
}

/* The action, and when, from now on. */
static void play_action(announcer_scene *at, int64_t seconds_from_now) {
  char when[64];
  char body[128];
  write_time(when, "%Y-%m-%dT%H:%M:%SZ", seconds_from_now);
  (void)snprintf(body, sizeof body, "{\"action\": \"terminate\", \"time\": \"%s\"}", when);
  play(at, 1, ACTION_LINE, "\r\nX-aws-ec2-metadata-token: tok-en==\r\n", 200, NULL, body);
}

static void amazon_is_asked_with_a_token(void **state) {
  announcer_scene *at = *state;
  play_token(at);
  assert_int_equal(announcer_scene_ask(at, "aws"), EVEN_OK);
  turn_until(at, "GET /latest/meta-data/spot/instance-action ", 3);
  assert_int_equal(metadata_service_count(&at->service, "PUT /latest/api/token "), 1);
  assert_int_equal(metadata_service_count(&at->service, "GET /latest/meta-data/events"), 0);
  play_action(at, 100);
  assert_true(announcer_scene_is_due(at));
  assert_true(at->seconds > 10 && at->seconds <= 100);
  assert_string_equal(at->what, "aws announces the machine's end (terminate)");
  assert_int_equal(at->tellings, 0);
}

static void a_token_that_is_no_more_valid_is_replaced(void **state) {
  announcer_scene *at = *state;
  play_token(at);
  play(at, 1, ACTION_LINE, "", 401, NULL, "");
  assert_int_equal(announcer_scene_ask(at, "aws"), EVEN_OK);
  turn_until(at, "PUT /latest/api/token ", 2);
  announcer_scene_until_told(at, 1); /* one that never is */
  play_action(at, 100);
  assert_true(announcer_scene_is_due(at));
}

static void a_recommendation_counts_only_where_it_was_asked_for(void **state) {
  announcer_scene *at = *state;
  play_token(at);
  play(at, 2, REBALANCE_LINE, "\r\nX-aws-ec2-metadata-token: tok-en==\r\n", 200, NULL,
       "{\"noticeTime\":\"2020-10-27T08:22:00Z\"}");
  assert_int_equal(announcer_scene_ask(at, "aws"), EVEN_OK);
  turn_until(at, "GET /latest/meta-data/spot/instance-action ", 3);
  assert_int_equal(metadata_service_count(&at->service, "GET /latest/meta-data/events"), 0);
  even_announcer_close(at->announcer);
  assert_int_equal(announcer_scene_ask(at, "aws+rebalance"), EVEN_OK);
  assert_true(announcer_scene_is_due(at));
  assert_true(at->seconds > 76 && at->seconds < 78); /* those of --notice: it names no end */
  assert_string_equal(at->what, "aws+rebalance announces the machine's end (rebalance recommendation)");
}

static void google_is_asked_with_its_header(void **state) {
  announcer_scene *at = *state;
  play(at, 0, PREEMPTED_LINE, "\r\nMetadata-Flavor: Google\r\n", 200, "Metadata-Flavor: Google\r\n", "FALSE");
  assert_int_equal(announcer_scene_ask(at, "gcp"), EVEN_OK);
  turn_until(at, "GET /computeMetadata/v1/instance/preempted ", 3);
  play(at, 0, PREEMPTED_LINE, "\r\nMetadata-Flavor: Google\r\n", 200, "Metadata-Flavor: Google\r\n", "TRUE");
  assert_true(announcer_scene_is_due(at));
  assert_true(at->seconds <= 30);
  assert_string_equal(at->what, "gcp announces the machine's end (preempted)");
}

static void play_event(announcer_scene *at, const char *type, const char *name, int64_t seconds_from_now) {
  char when[64];
  char body[512];
  write_time(when, "%a, %d %b %Y %H:%M:%S GMT", seconds_from_now);
  (void)snprintf(
      body, sizeof body,
      "{\"DocumentIncarnation\":2,\"Events\":[{\"EventId\":\"A\",\"EventStatus\":\"Scheduled\",\"EventType\":"
      "\"%s\",\"ResourceType\":\"VirtualMachine\",\"Resources\":[\"other\",\"%s\"],\"NotBefore\":\"%s\"}]}",
      type, name, when);
  play(at, 1, EVENTS_LINE, "\r\nMetadata: true\r\n", 200, NULL, body);
}

static void azure_is_asked_for_this_machine(void **state) {
  announcer_scene *at = *state;
  play(at, 0, NAME_LINE, "\r\nMetadata: true\r\n", 200, NULL, "vm_3");
  play_event(at, "Preempt", "vm_4", 30);
  assert_int_equal(announcer_scene_ask(at, "azure"), EVEN_OK);
  turn_until(at, "GET /metadata/scheduledevents", 3);
  assert_int_equal(metadata_service_count(&at->service, "GET /metadata/instance/compute/name"), 1);
  play_event(at, "Preempt", "vm_3", 90);
  assert_true(announcer_scene_is_due(at));
  assert_true(at->seconds > 5 && at->seconds <= 90);
  assert_string_equal(at->what, "azure announces the machine's end (Preempt)");
}

static void an_end_that_is_far_away_is_told_and_waited_for(void **state) {
  announcer_scene *at = *state;
  play(at, 0, NAME_LINE, "", 200, NULL, "vm_3");
  play_event(at, "Redeploy", "vm_3", 7 * 86400);
  assert_int_equal(announcer_scene_ask(at, "azure"), EVEN_OK);
  announcer_scene_until_told(at, 1);
  assert_non_null(strstr(at->told, "azure announces the end of this machine (Redeploy) in 60"));
  assert_non_null(strstr(at->told, "the training goes on until 120 s before"));
  turn_until(at, "GET /metadata/scheduledevents", 4);
  assert_int_equal(at->tellings, 1);
  clock_ahead_set((7 * 86400 - 100) * SECOND_NS);
  assert_true(announcer_scene_is_due(at));
  assert_true(at->seconds <= 100);
}

/* In an hour, as an answer says that names no time of day. */
static void one_that_is_named_in_seconds_is_waited_for_too(void **state) {
  announcer_scene *at = *state;
  play(at, 0, "GET / ", "", 200, NULL, "3600");
  (void)snprintf(at->place, sizeof at->place, "http://127.0.0.1:%d", at->service.port);
  assert_int_equal(announcer_scene_ask_place(at, at->place), EVEN_OK);
  turn_until(at, "GET / ", 3);
  assert_int_equal(at->tellings, 1);
  play(at, 0, "GET / ", "", 200, NULL, "110");
  assert_true(announcer_scene_is_due(at));
  assert_true(at->seconds <= 110);
}

static void an_end_that_was_to_be_long_ago_is_none(void **state) {
  announcer_scene *at = *state;
  play_token(at);
  play_action(at, -3600);
  assert_int_equal(announcer_scene_ask(at, "aws"), EVEN_OK);
  turn_until(at, "GET /latest/meta-data/spot/instance-action ", 3);
  play_action(at, -20); /* or a clock is wrong */
  assert_true(announcer_scene_is_due(at));
  assert_true(at->seconds > 76 && at->seconds < 78);
}

static void an_address_of_ones_own_is_asked(void **state) {
  announcer_scene *at = *state;
  char head[80];
  (void)snprintf(head, sizeof head, "GET /ends?now HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n", at->service.port);
  play(at, 0, head, "", 204, NULL, "");
  (void)snprintf(at->place, sizeof at->place, "http://127.0.0.1:%d/ends?now", at->service.port);
  assert_int_equal(announcer_scene_ask_place(at, at->place), EVEN_OK);
  turn_until(at, "GET /ends?now ", 3);
  play(at, 0, head, "", 200, NULL, "42\n");
  assert_true(announcer_scene_is_due(at));
  assert_true(at->seconds <= 42);
}

static void proxies_are_not_asked(void **state) {
  announcer_scene *at = *state;
  assert_int_equal(setenv("http_proxy", "http://127.0.0.1:1", 1), 0);
  play_token(at);
  play_action(at, 100);
  assert_int_equal(announcer_scene_ask(at, "aws"), EVEN_OK);
  assert_true(announcer_scene_is_due(at));
  assert_int_equal(unsetenv("http_proxy"), 0);
}

static void auto_finds_the_one_that_answers(void **state) {
  announcer_scene *at = *state;
  play(at, 0, NAME_LINE, "\r\nMetadata: true\r\n", 200, NULL, "vm_3");
  play_event(at, "Terminate", "vm_3", 60);
  play(at, 2, MACHINE_LINE, "\r\nMetadata: true\r\n", 200, NULL, "5c08b38e-4d57-4c23-ac45-aca61037f084");
  assert_int_equal(announcer_scene_ask(at, "auto"), EVEN_OK);
  assert_true(announcer_scene_is_due(at));
  assert_string_equal(at->what, "azure announces the machine's end (Terminate)");
  assert_int_equal(at->tellings, 1);
  assert_non_null(strstr(at->told, "azure is asked every"));
  even_announcer_close(at->announcer);
  memset(at->service.lines, 0, sizeof at->service.lines);
  play(at, 0, PREEMPTED_LINE, "\r\nMetadata-Flavor: Google\r\n", 200, "metadata-flavor: Google\r\n", "TRUE");
  assert_int_equal(announcer_scene_ask(at, "auto"), EVEN_OK);
  assert_true(announcer_scene_is_due(at));
  assert_non_null(strstr(at->told, "gcp is asked every"));
  even_announcer_close(at->announcer);
  play_token(at);
  play_action(at, 60);
  assert_int_equal(announcer_scene_ask(at, "auto"), EVEN_OK);
  assert_true(announcer_scene_is_due(at));
  assert_non_null(strstr(at->told, "aws is asked every"));
}

/* A service that says yes to everything, or no, is none of the three. */
static void auto_says_nothing_where_none_answers(void **state) {
  announcer_scene *at = *state;
  assert_int_equal(announcer_scene_ask(at, "auto"), EVEN_OK);
  turn_until(at, "GET /metadata/instance/compute/name", 2);
  for (int i = 0; i < SOME_TURNS; i++) {
    assert_false(announcer_scene_turn(at));
  }
  assert_int_equal(metadata_service_count(&at->service, ""), 6); /* two rounds, and no more */
  even_announcer_close(at->announcer);
  play(at, 0, "PUT ", "", 200, NULL, "token");
  play(at, 1, "GET /computeMetadata", "", 200, NULL, "TRUE");
  play(at, 2, "GET /metadata/", "", 200, NULL, "ok");
  at->service.asked[0] = '\0';
  assert_int_equal(announcer_scene_ask(at, "auto"), EVEN_OK);
  turn_until(at, "GET /metadata/instance/compute/vmId", 2);
  for (int i = 0; i < SOME_TURNS; i++) {
    assert_false(announcer_scene_turn(at));
  }
  assert_int_equal(metadata_service_count(&at->service, "GET /metadata/scheduledevents"), 0);
  assert_int_equal(at->tellings, 0);
}

static void nobody_listens(void **state) {
  announcer_scene *at = *state;
  (void)close(at->service.listener);
  at->service.listener = -1;
  assert_int_equal(announcer_scene_ask(at, "aws"), EVEN_OK);
  announcer_scene_until_told(at, 1);
  assert_non_null(strstr(at->told, "aws cannot be asked whether this machine ends soon: 127.0.0.1, port "));
  for (int i = 0; i < SOME_TURNS; i++) {
    assert_false(announcer_scene_turn(at));
  }
  assert_int_equal(at->tellings, 1); /* and not again */
}

/* Each of them is told once, takes bounded memory, and does no harm to what follows. */
static void services_that_misbehave_are_told_once(void **state) {
  announcer_scene *at = *state;
  for (int manner = MANNER_CLOSES; manner < MANNER_COUNT; manner++) {
    uint64_t ahead = 0;
    play(at, 0, PREEMPTED_LINE, "", 200, "Metadata-Flavor: Google\r\n", "FALSE");
    at->service.manner = (metadata_manner)manner;
    at->service.asked[0] = at->told[0] = '\0';
    at->tellings = 0;
    assert_int_equal(announcer_scene_ask(at, "gcp"), EVEN_OK);
    for (int i = 0; i < ANNOUNCER_SCENE_TURNS && at->tellings == 0; i++) {
      assert_false(announcer_scene_turn(at));
      ahead += SECOND_NS / 10;
      clock_ahead_set(ahead);
    }
    assert_non_null(strstr(at->told, "gcp cannot be asked whether this machine ends soon: "));
    for (int i = 0; i < SOME_TURNS; i++) {
      assert_false(announcer_scene_turn(at));
      ahead += SECOND_NS / 10;
      clock_ahead_set(ahead);
    }
    assert_int_equal(at->tellings, 1);
    play(at, 0, PREEMPTED_LINE, "", 200, "Metadata-Flavor: Google\r\n", "TRUE");
    at->service.manner = MANNER_WELL;
    for (int i = 0; i < ANNOUNCER_SCENE_TURNS && !announcer_scene_turn(at);
         i++) { /* the connection before may have to be given up first */
      ahead += SECOND_NS / 10;
      clock_ahead_set(ahead);
    }
    assert_true(announcer_scene_is_due(at));
    even_announcer_close(at->announcer);
    at->announcer = NULL;
    fault_reset();
  }
}

static void an_answer_may_come_byte_by_byte(void **state) {
  announcer_scene *at = *state;
  at->service.manner = MANNER_BYTEWISE;
  play_token(at);
  play_action(at, 100);
  assert_int_equal(announcer_scene_ask(at, "aws"), EVEN_OK);
  assert_true(announcer_scene_is_due(at));
}

static void off_asks_nobody_and_nonsense_is_refused(void **state) {
  announcer_scene *at = *state;
  assert_int_equal(announcer_scene_ask_place(at, "off"), EVEN_OK);
  assert_null(at->announcer);
  even_announcer_tick(NULL);
  assert_false(even_announcer_due(NULL, &at->seconds, at->what));
  assert_int_equal(announcer_scene_ask_place(at, "ec2"), EVEN_ERR_USAGE);
  assert_null(at->announcer);
}

/* From the first question to the end; another one is asked after a call that failed. */
static even_status find_end(void *context) {
  announcer_scene *at = context;
  return announcer_scene_finish(at, announcer_scene_ask(at, "aws"));
}

static void each_call_to_the_kernel_may_fail(void **state) {
  announcer_scene *at = *state;
  play_token(at);
  play_action(at, 100);
  int before = open_descriptors();
  assert_true(fault_each_os(find_end, at, EIO) > 10);
  metadata_service_turn(&at->service); /* sees that the connection is closed */
  assert_int_equal(open_descriptors(), before);
}

static void memory_may_lack_at_any_time(void **state) {
  announcer_scene *at = *state;
  play_token(at);
  play_action(at, 100);
  long tried = 0;
  for (long nth = 1; tried == 0; nth++) {
    assert_true(nth < 1000);
    fault_allocation(nth);
    even_status status = find_end(at);
    assert_true(status == EVEN_OK || status == EVEN_ERR_MEMORY); /* that of the opening */
    tried = fault_allocations() < nth ? nth : 0;
    assert_int_equal(fault_live_blocks(), 0);
    fault_reset();
  }
  assert_true(tried > 3);
}

int main(void) {
#define SCENE_TEST(test) cmocka_unit_test_setup_teardown(test, announcer_scene_open, announcer_scene_close)
  const struct CMUnitTest tests[] = {
      SCENE_TEST(amazon_is_asked_with_a_token),
      SCENE_TEST(a_token_that_is_no_more_valid_is_replaced),
      SCENE_TEST(a_recommendation_counts_only_where_it_was_asked_for),
      SCENE_TEST(google_is_asked_with_its_header),
      SCENE_TEST(azure_is_asked_for_this_machine),
      SCENE_TEST(an_end_that_is_far_away_is_told_and_waited_for),
      SCENE_TEST(one_that_is_named_in_seconds_is_waited_for_too),
      SCENE_TEST(an_end_that_was_to_be_long_ago_is_none),
      SCENE_TEST(an_address_of_ones_own_is_asked),
      SCENE_TEST(proxies_are_not_asked),
      SCENE_TEST(auto_finds_the_one_that_answers),
      SCENE_TEST(auto_says_nothing_where_none_answers),
      SCENE_TEST(nobody_listens),
      SCENE_TEST(services_that_misbehave_are_told_once),
      SCENE_TEST(an_answer_may_come_byte_by_byte),
      SCENE_TEST(off_asks_nobody_and_nonsense_is_refused),
      SCENE_TEST(each_call_to_the_kernel_may_fail),
      SCENE_TEST(memory_may_lack_at_any_time),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
