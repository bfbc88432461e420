/* One question after the other, each a connection of its own or a child. */
#include "orchestrator/announcer.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/http_answer.h"
#include "base/utf8.h"
#include "orchestrator/notice_command.h"
#include "orchestrator/notice_place.h"
#include "os/clock.h"
#include "os/pipe.h"
#include "os/socket.h"

#include <stdio.h>
#include <string.h>

/* READS: at most in one call, so that others of the loop have their turn. AFTER: failures in a row before they are
 * told. PROBES: rounds of `auto`. */
enum { TOKEN = 512, READS = 8, AFTER = 3, PROBES = 2, LIFE_SECONDS = 21600, HTTP_PORT = 80 };
enum { MOST_BYTES = EVEN_HTTP_MOST_HEAD + 2 * EVEN_HTTP_MOST_BODY };

static const double EVERY_SECONDS = 2; /* a third of the shortest notice is for saving, not for asking */
static const uint64_t SECOND_NS = 1000000000u;
static const uint64_t PROBE_NS = 2000000000u;
static const uint64_t ANSWER_NS = 5000000000u;
static const uint64_t COMMAND_NS = 10000000000u;
static const uint64_t FIRST_EVENTS_NS = 130000000000u; /* Azure: "up to two minutes" */
static const double WRONG_CLOCK_SECONDS = 5;           /* nearer than this it is not to be believed */
static const double PAST_SECONDS = 600;
static const double NEAR_SECONDS = 120;
static const double LEAST_SECONDS = 0.1; /* never 0, which says nothing (job.h) */

typedef enum question {
  ASK_NOTHING,
  ASK_TOKEN,
  ASK_ACTION,
  ASK_REBALANCE,
  ASK_PREEMPTED,
  ASK_NAME,
  ASK_MACHINE,
  ASK_EVENTS,
  ASK_URL,
  ASK_COMMAND
} question;

struct even_announcer {
  even_announcer_params params;
  even_notice_place place;
  question asked; /* and not answered yet */
  question next;
  uint64_t next_ns;
  uint64_t until_ns; /* so long an answer is waited for */
  int fd;            /* -1: no connection */
  even_loop_watch watch;
  char request[EVEN_NOTICE_TEXT + TOKEN + 256];
  size_t request_bytes;
  size_t sent;
  even_text came;
  char token[TOKEN]; /* of AWS */
  uint64_t token_until_ns;
  char name[EVEN_ANNOUNCEMENT_NAME]; /* of this machine, as Azure says it */
  bool answers;                      /* it has, once */
  int probes;                        /* rounds of `auto` that came to nothing */
  int failures;                      /* in a row */
  bool told;                         /* of failures */
  bool told_far;
  int64_t told_at; /* of an end that is far away */
  even_announcement found;
  uint64_t found_ns;
  even_notice_command command;
};

static question first_question(const even_announcer *announcer) {
  switch (announcer->place.service) {
    case EVEN_NOTICE_AUTO:
      return ASK_TOKEN;
    case EVEN_NOTICE_AWS:
      return even_clock_ns() < announcer->token_until_ns ? ASK_ACTION : ASK_TOKEN;
    case EVEN_NOTICE_GCP:
      return ASK_PREEMPTED;
    case EVEN_NOTICE_AZURE:
      return announcer->name[0] == '\0' ? ASK_NAME : ASK_EVENTS;
    case EVEN_NOTICE_URL:
      return ASK_URL;
    case EVEN_NOTICE_EXEC:
      return ASK_COMMAND;
    case EVEN_NOTICE_OFF:
      break;
  }
  return ASK_NOTHING;
}

static void rest(even_announcer *announcer) {
  announcer->asked = ASK_NOTHING;
  announcer->next = first_question(announcer);
  announcer->next_ns = even_clock_ns() + (uint64_t)(announcer->params.every_seconds * 1e9);
}

static void hang_up(even_announcer *announcer) {
  even_loop_remove(announcer->params.loop, &announcer->watch);
  even_pipe_close(announcer->fd);
  announcer->fd = -1;
  even_text_clear(&announcer->came);
}

static const char *name_of(const even_announcer *announcer, char room[64]) {
  return even_notice_place_name(&announcer->place, room);
}

/* The next cloud, or the next round of them; after the last nobody is asked any more. */
static void probe_on(even_announcer *announcer) {
  static const question after[] = {[ASK_TOKEN] = ASK_PREEMPTED, [ASK_PREEMPTED] = ASK_NAME};
  question asked = announcer->asked;
  rest(announcer);
  if (asked == ASK_TOKEN || asked == ASK_PREEMPTED) {
    announcer->next = after[asked];
    announcer->next_ns = 0;
  } else if (++announcer->probes == PROBES) {
    announcer->place.service = EVEN_NOTICE_OFF;
  }
}

static void fail(even_announcer *announcer, const char *why) {
  char room[64];
  char words[400];
  char clean[240];
  bool token = announcer->asked == ASK_TOKEN;
  hang_up(announcer);
  if (announcer->place.service == EVEN_NOTICE_AUTO) {
    probe_on(announcer);
    return;
  }
  rest(announcer);
  if (++announcer->failures < AFTER || announcer->told) {
    return;
  }
  announcer->told = true;
  (void)snprintf(words, sizeof words,
                 "%s cannot be asked whether this machine ends soon: %s; it is asked on every %g s (--notice-from)%s",
                 name_of(announcer, room), even_utf8_clean(why, clean, sizeof clean), announcer->params.every_seconds,
                 token ? "; in a container its response hop limit must be 2" : "");
  announcer->params.tell(announcer->params.context, words);
}

/* For the error of a call. */
static void fail_for_error(even_announcer *announcer) {
  const even_error why = *even_error_last();
  even_error_clear();
  fail(announcer, why.what);
}

/* ---- what was found ---- */

/* < 0: that is not said. */
static double left_seconds(const even_announcer *announcer) {
  const even_announcement *found = &announcer->found;
  if (found->seconds >= 0) {
    double since = (double)(even_clock_ns() - announcer->found_ns) * 1e-9;
    return found->seconds > since ? found->seconds - since : 0;
  }
  return found->at == 0 ? -1 : (double)found->at - (double)even_clock_wall_ns() * 1e-9;
}

static double near_seconds(const even_announcer *announcer) {
  double seconds = announcer->params.seconds;
  return seconds > NEAR_SECONDS ? seconds : NEAR_SECONDS;
}

static void tell_far(even_announcer *announcer) {
  char room[64];
  char words[320];
  double left = left_seconds(announcer);
  bool known = announcer->told_far && announcer->told_at == announcer->found.at;
  if (!announcer->found.due || left <= near_seconds(announcer) || known) {
    return;
  }
  announcer->told_far = true;
  announcer->told_at = announcer->found.at;
  (void)snprintf(words, sizeof words,
                 "%s announces the end of this machine (%s) in %.0f s: the training goes on until %.0f s before",
                 name_of(announcer, room), announcer->found.what, left, near_seconds(announcer));
  announcer->params.tell(announcer->params.context, words);
}

static void take_found(even_announcer *announcer, const even_announcement *found) {
  announcer->found = *found;
  announcer->found_ns = even_clock_ns();
  announcer->failures = 0;
  rest(announcer);
  tell_far(announcer);
}

bool even_announcer_due(even_announcer *announcer, double *seconds, char what[EVEN_ANNOUNCEMENT_WORDS * 2]) {
  char room[64];
  if (announcer == NULL || !announcer->found.due) {
    return false;
  }
  bool dated = announcer->found.seconds < 0 && announcer->found.at != 0;
  double left = left_seconds(announcer);
  if (left > near_seconds(announcer) || (dated && left < -PAST_SECONDS)) {
    return false;
  }
  bool unknown = left < 0 || (dated && left < WRONG_CLOCK_SECONDS);
  *seconds = unknown ? announcer->params.seconds : left > LEAST_SECONDS ? left : LEAST_SECONDS;
  (void)snprintf(what, EVEN_ANNOUNCEMENT_WORDS * 2, "%s announces the machine's end (%s)", name_of(announcer, room),
                 announcer->found.what);
  return true;
}

/* ---- answers ---- */

/* A word that may stand in a header. */
static bool keep_word(const even_text *body, char *out, size_t room) {
  size_t length = body->length;
  while (length > 0 && (body->data[length - 1] == '\n' || body->data[length - 1] == '\r')) {
    length--;
  }
  bool fits = length > 0 && length < room;
  for (size_t i = 0; fits && i < length; i++) {
    fits = body->data[i] > ' ' && body->data[i] <= '~';
  }
  if (fits) {
    memcpy(out, body->data, length);
    out[length] = '\0';
  }
  return fits;
}

static void begin(even_announcer *announcer, question asked);

static void found_service(even_announcer *announcer, even_notice_service service) {
  char room[64];
  char words[160];
  if (announcer->place.service != EVEN_NOTICE_AUTO) {
    return;
  }
  announcer->place.service = service;
  (void)snprintf(words, sizeof words, "%s is asked every %g s whether this machine ends soon (--notice-from auto)",
                 name_of(announcer, room), announcer->params.every_seconds);
  announcer->params.tell(announcer->params.context, words);
}

static even_status no_word(const char *what, const even_http_answer *answer) {
  return even_fail(EVEN_ERR_INPUT, "it gives no %s (status %d)", what, answer->status);
}

static even_status take_token(even_announcer *announcer, const even_http_answer *answer, question *next) {
  char header[EVEN_HTTP_HEADER];
  even_http_answer_header(answer, "X-aws-ec2-metadata-token-ttl-seconds", header);
  bool its = announcer->place.service == EVEN_NOTICE_AWS || header[0] != '\0';
  if (answer->status != 200 || !its || !keep_word(&answer->body, announcer->token, sizeof announcer->token)) {
    return no_word("token", answer);
  }
  announcer->token_until_ns = even_clock_ns() + LIFE_SECONDS / 2 * SECOND_NS;
  found_service(announcer, EVEN_NOTICE_AWS);
  *next = ASK_ACTION;
  return EVEN_OK;
}

static even_status take_action(even_announcer *announcer, const even_http_answer *answer, even_announcement *found,
                               question *next) {
  const char *body = even_text_string(&answer->body);
  if (answer->status == 401) {
    announcer->token_until_ns = 0; /* it is no more valid */
  }
  if (announcer->asked == ASK_REBALANCE) {
    return even_announcement_of_aws_rebalance(answer->status, body, answer->body.length, found);
  }
  EVEN_TRY(even_announcement_of_aws(answer->status, body, answer->body.length, found));
  *next = !found->due && announcer->place.rebalance ? ASK_REBALANCE : ASK_NOTHING;
  return EVEN_OK;
}

static even_status take_preempted(even_announcer *announcer, const even_http_answer *answer, even_announcement *found) {
  char flavor[EVEN_HTTP_HEADER];
  even_http_answer_header(answer, "Metadata-Flavor", flavor);
  if (strcmp(flavor, "Google") != 0) {
    return even_fail(EVEN_ERR_INPUT, "the answer is not of Google's service (no Metadata-Flavor)");
  }
  EVEN_TRY(even_announcement_of_gcp(answer->status, even_text_string(&answer->body), answer->body.length, found));
  found_service(announcer, EVEN_NOTICE_GCP);
  return EVEN_OK;
}

static even_status take_name(even_announcer *announcer, const even_http_answer *answer, question *next) {
  if (answer->status != 200 || !keep_word(&answer->body, announcer->name, sizeof announcer->name)) {
    return no_word("name of this machine", answer);
  }
  *next = announcer->place.service == EVEN_NOTICE_AUTO ? ASK_MACHINE : ASK_EVENTS;
  return EVEN_OK;
}

/* "5c08b38e-4d57-4c23-ac45-aca61037f084" */
static bool is_uuid(const char *word) {
  static const char form[] = "xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx";
  bool fits = strlen(word) == sizeof form - 1;
  for (size_t i = 0; fits && form[i] != '\0'; i++) {
    fits = form[i] == '-' ? word[i] == '-' : strchr("0123456789abcdefABCDEF", word[i]) != NULL;
  }
  return fits;
}

/* Who answers any question with a word has no such number. */
static even_status take_machine(even_announcer *announcer, const even_http_answer *answer, question *next) {
  char number[TOKEN];
  if (answer->status != 200 || !keep_word(&answer->body, number, sizeof number) || !is_uuid(number)) {
    return no_word("vmId", answer);
  }
  found_service(announcer, EVEN_NOTICE_AZURE);
  *next = ASK_EVENTS;
  return EVEN_OK;
}

/* What follows from a whole answer: another question, or what is announced. */
static even_status take(even_announcer *announcer, const even_http_answer *answer, even_announcement *found,
                        question *next) {
  const char *body = even_text_string(&answer->body);
  size_t bytes = answer->body.length;
  *next = ASK_NOTHING;
  switch (announcer->asked) {
    case ASK_TOKEN:
      return take_token(announcer, answer, next);
    case ASK_ACTION:
    case ASK_REBALANCE:
      return take_action(announcer, answer, found, next);
    case ASK_PREEMPTED:
      return take_preempted(announcer, answer, found);
    case ASK_NAME:
      return take_name(announcer, answer, next);
    case ASK_MACHINE:
      return take_machine(announcer, answer, next);
    case ASK_EVENTS:
      EVEN_TRY(even_announcement_of_azure(answer->status, body, bytes, announcer->name, found));
      announcer->answers = true;
      return EVEN_OK;
    case ASK_URL:
      return even_announcement_of_text(answer->status, body, bytes, found);
    case ASK_COMMAND:
    case ASK_NOTHING:
      break;
  }
  return even_fail(EVEN_ERR_STATE, "nothing was asked");
}

static void look_at(even_announcer *announcer, bool ended) {
  even_http_answer answer;
  even_announcement found = {.seconds = -1};
  question next = ASK_NOTHING;
  bool whole = false;
  even_status status =
      even_http_answer_read(even_text_string(&announcer->came), announcer->came.length, ended, &answer, &whole);
  if (status == EVEN_OK && whole) {
    status = take(announcer, &answer, &found, &next);
  }
  even_http_answer_free(&answer);
  if (status != EVEN_OK) {
    fail_for_error(announcer);
  } else if (whole) {
    hang_up(announcer);
    if (next != ASK_NOTHING) {
      begin(announcer, next);
    } else {
      take_found(announcer, &found);
    }
  } else if (announcer->came.length > MOST_BYTES) {
    fail(announcer, "its answer does not end");
  }
}

/* ---- connections ---- */

static bool send_on(even_announcer *announcer) {
  bool broken = false;
  int reason = 0;
  if (announcer->sent == announcer->request_bytes) {
    return true;
  }
  announcer->sent += even_socket_write(announcer->fd, announcer->request + announcer->sent,
                                       announcer->request_bytes - announcer->sent, &broken, &reason);
  if (broken) {
    (void)even_fail_errno(reason, "%s, port %d, cannot be reached", announcer->place.address, announcer->place.port);
    fail_for_error(announcer);
    return false;
  }
  if (announcer->sent == announcer->request_bytes &&
      even_loop_writable(announcer->params.loop, &announcer->watch, false) != EVEN_OK) {
    fail_for_error(announcer);
    return false;
  }
  return announcer->sent == announcer->request_bytes;
}

static void on_ready(void *context, int fd) {
  even_announcer *announcer = context;
  char buffer[4096];
  size_t got = 0;
  int reason = 0;
  even_pipe_state state = EVEN_PIPE_DATA;
  if (!send_on(announcer)) {
    return;
  }
  for (int reads = 0; reads < READS && state == EVEN_PIPE_DATA && announcer->came.length <= MOST_BYTES; reads++) {
    state = even_socket_read(fd, buffer, sizeof buffer, &got, &reason);
    if (state == EVEN_PIPE_DATA) {
      even_text_append(&announcer->came, buffer, got);
    }
  }
  if (even_text_status(&announcer->came) != EVEN_OK) {
    fail_for_error(announcer);
  } else if (state == EVEN_PIPE_ENDED && reason != 0) {
    (void)even_fail_errno(reason, "%s, port %d, cannot be reached", announcer->place.address, announcer->place.port);
    fail_for_error(announcer);
  } else {
    look_at(announcer, state == EVEN_PIPE_ENDED);
  }
}

/* Method, path and headers of a question. */
static void write_request(even_announcer *announcer) {
  static const struct {
    const char *line;
    const char *header;
  } forms[] = {
      [ASK_TOKEN] = {"PUT /latest/api/token", "X-aws-ec2-metadata-token-ttl-seconds: 21600\r\nContent-Length: 0\r\n"},
      [ASK_ACTION] = {"GET /latest/meta-data/spot/instance-action", "X-aws-ec2-metadata-token: "},
      [ASK_REBALANCE] = {"GET /latest/meta-data/events/recommendations/rebalance", "X-aws-ec2-metadata-token: "},
      [ASK_PREEMPTED] = {"GET /computeMetadata/v1/instance/preempted", "Metadata-Flavor: Google\r\n"},
      [ASK_NAME] = {"GET /metadata/instance/compute/name?api-version=2021-02-01&format=text", "Metadata: true\r\n"},
      [ASK_MACHINE] = {"GET /metadata/instance/compute/vmId?api-version=2021-02-01&format=text", "Metadata: true\r\n"},
      [ASK_EVENTS] = {"GET /metadata/scheduledevents?api-version=2020-07-01", "Metadata: true\r\n"},
      [ASK_URL] = {"GET ", ""},
  };
  question asked = announcer->asked;
  bool with_token = asked == ASK_ACTION || asked == ASK_REBALANCE;
  char port[16] = "";
  if (announcer->place.port != HTTP_PORT) { /* RFC 9110, 7.2 */
    (void)snprintf(port, sizeof port, ":%d", announcer->place.port);
  }
  int length = snprintf(announcer->request, sizeof announcer->request,
                        "%s%s HTTP/1.1\r\nHost: %s%s\r\nUser-Agent: evenstep\r\nConnection: close\r\n%s%s%s\r\n",
                        forms[asked].line, asked == ASK_URL ? announcer->place.text : "", announcer->place.address,
                        port, forms[asked].header, with_token ? announcer->token : "", with_token ? "\r\n" : "");
  announcer->request_bytes = (size_t)length; /* a path, a token and the rest: it fits */
  announcer->sent = 0;
}

static even_status connect_to(even_announcer *announcer) {
  const even_notice_place *place = &announcer->place;
  EVEN_TRY(even_socket_connect_begin(place->address, place->port, &announcer->fd));
  EVEN_TRY(even_loop_add(announcer->params.loop, &announcer->watch, announcer->fd, on_ready, announcer));
  return even_loop_writable(announcer->params.loop, &announcer->watch, true);
}

/* ---- commands ---- */

static void tell_session(const even_announcer *announcer, pid_t leader, bool begins) {
  if (announcer->params.session != NULL) {
    announcer->params.session(announcer->params.context, leader, begins);
  }
}

pid_t even_announcer_session(const even_announcer *announcer) {
  return announcer != NULL && even_notice_command_lives(&announcer->command) ? announcer->command.process.pid : 0;
}

static void begin_command(even_announcer *announcer) {
  if (even_notice_command_lives(&announcer->command)) {
    fail(announcer, "the command takes too long, and has not ended since it was killed");
  } else if (even_notice_command_start(&announcer->command, announcer->place.text) != EVEN_OK) {
    fail_for_error(announcer);
  } else {
    tell_session(announcer, announcer->command.process.pid, true);
  }
}

bool even_announcer_took_end(even_announcer *announcer, const even_process_end *end) {
  bool notice = false;
  even_status status = EVEN_OK;
  even_announcement found = {.seconds = -1};
  if (announcer == NULL || !even_notice_command_ended(&announcer->command, end, &notice, &status)) {
    return false;
  }
  tell_session(announcer, end->pid, false);
  if (status != EVEN_OK) {
    fail_for_error(announcer);
    return true;
  }
  if (notice) {
    const even_text *said = &announcer->command.said;
    even_announcement_of_command(even_text_string(said), said->length, &found);
  }
  take_found(announcer, &found);
  return true;
}

/* ---- questions ---- */

static uint64_t patience_ns(const even_announcer *announcer) {
  if (announcer->place.service == EVEN_NOTICE_AUTO) {
    return PROBE_NS;
  }
  if (announcer->asked == ASK_COMMAND) {
    return COMMAND_NS;
  }
  return announcer->asked == ASK_EVENTS && !announcer->answers ? FIRST_EVENTS_NS : ANSWER_NS;
}

static void begin(even_announcer *announcer, question asked) {
  announcer->asked = asked;
  announcer->until_ns = even_clock_ns() + patience_ns(announcer);
  if (asked == ASK_COMMAND) {
    begin_command(announcer);
    return;
  }
  write_request(announcer);
  if (connect_to(announcer) != EVEN_OK) {
    fail_for_error(announcer);
  }
}

static void give_up(even_announcer *announcer) {
  if (announcer->asked == ASK_COMMAND && !announcer->command.killed) {
    announcer->until_ns = even_clock_ns() + COMMAND_NS; /* its end comes by even_announcer_took_end */
    even_notice_command_kill(&announcer->command);
    return;
  }
  if (announcer->asked == ASK_COMMAND) { /* the kernel holds it: there is no other one before its end */
    fail(announcer, "the command takes too long, and has not ended since it was killed");
    return;
  }
  fail(announcer, announcer->came.length > 0 ? "its answer does not come to an end" : "it does not answer");
}

void even_announcer_tick(even_announcer *announcer) {
  if (announcer == NULL || announcer->place.service == EVEN_NOTICE_OFF) {
    return;
  }
  uint64_t now = even_clock_ns();
  if (announcer->asked != ASK_NOTHING && now >= announcer->until_ns) {
    give_up(announcer);
  }
  if (announcer->asked == ASK_NOTHING && now >= announcer->next_ns && announcer->place.service != EVEN_NOTICE_OFF) {
    begin(announcer, announcer->next);
  }
}

even_status even_announcer_open(const even_announcer_params *params, even_announcer **out) {
  even_notice_place place;
  *out = NULL;
  EVEN_TRY(even_notice_place_read(params->place, &place));
  if (place.service == EVEN_NOTICE_OFF) {
    return EVEN_OK;
  }
  EVEN_TRY(EVEN_NEW(out));
  even_announcer *announcer = *out;
  announcer->params = *params;
  announcer->params.place = NULL;
  if (!(params->every_seconds > 0)) {
    announcer->params.every_seconds = EVERY_SECONDS;
  }
  announcer->place = place;
  announcer->fd = -1;
  announcer->watch.fd = -1;
  even_notice_command_prepare(params->loop, &announcer->command);
  announcer->found.seconds = -1;
  rest(announcer);
  announcer->next_ns = 0; /* at once */
  return EVEN_OK;
}

void even_announcer_close(even_announcer *announcer) {
  if (announcer == NULL) {
    return;
  }
  hang_up(announcer);
  pid_t session = even_announcer_session(announcer);
  bool ended = even_notice_command_close(&announcer->command);
  if (session > 0 && ended) {
    tell_session(announcer, session, false);
  } else if (!ended) {
    char words[128];
    (void)snprintf(words, sizeof words, "the command of --notice-from (process %ld) does not end, and is left",
                   (long)session);
    announcer->params.tell(announcer->params.context, words);
  }
  even_text_free(&announcer->came);
  even_free(announcer);
}
