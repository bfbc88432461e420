/* What changes on a board, from agent to agent. */
#include "orchestrator/boards.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/json_writer.h"
#include "orchestrator/follower.h"
#include "orchestrator/gifts.h"
#include "orchestrator/remote.h"
#include "os/clock.h"
#include "os/socket.h"

#include <stdio.h>
#include <string.h>

/* Between two looks for where the members meet, for ranks that come to stand, for a process that comes to offer itself.
 */
enum { MEETING_MS = 2, STANDING_MS = 5, OFFERING_MS = 20, MOST_PORT = 65535 };
/* A first member that says nothing for so long has ended, or will be late: the usual ticks do for it. */
static const uint64_t MEETING_NS = 10000000000u;

struct even_boards {
  /* of the leader: what all hosts were told */
  uint32_t number;
  even_generation_wish wish;
  bool refused;
  uint32_t placed; /* the generation of which they know where it meets */
  unsigned gifts;  /* changes of what is given (gifts.h) that they know */
  /* of the others: what the leader was told */
  even_generation_words *told; /* of each rank */
  uint32_t met;                /* the generation of which it knows where it meets */
  bool begun;                  /* that this host, which came late, can be told of generations, */
  bool adopted;                /* and was told of the one that the others were at: of generation 0, too */
  /* of both */
  uint32_t seen; /* the newest generation, and since when it is */
  uint64_t seen_ns;
};

even_status even_boards_open(even_job *job) {
  if (job->most_groups < 2) {
    return EVEN_OK;
  }
  EVEN_TRY(EVEN_NEW(&job->boards));
  EVEN_TRY(EVEN_NEW_ARRAY(&job->boards->told, job->count));
  return even_gifts_open(job);
}

void even_boards_close(even_job *job) {
  even_gifts_close(job);
  if (job->boards != NULL) {
    even_free(job->boards->told);
    even_free(job->boards);
  }
  job->boards = NULL;
}

void even_boards_begin(even_job *job) {
  even_boards *boards = job->boards;
  if (boards != NULL) {
    even_generation_words *told = boards->told;
    memset(told, 0, job->count * sizeof *told);
    *boards = (even_boards){.told = told};
  }
}

/* So many generations there are not: whatever is said differs from it. */
static const even_generation_words nothing_known = {.stands = UINT64_MAX, .doubts = UINT64_MAX};

/* What the leader was told of the one before may have come after it forgot that, too. */
void even_boards_vacate(even_job *job, size_t rank) {
  even_generation_vacate(job->generation, (int)rank);
  if (job->boards != NULL) {
    job->boards->told[rank] = nothing_known;
  }
}

void even_boards_retell(even_job *job) {
  for (size_t i = 0; job->boards != NULL && i < job->count; i++) {
    job->boards->told[i] = nothing_known;
  }
  if (job->boards != NULL) {
    job->boards->met = 0;
  }
}

void even_boards_adopt(even_job *job, uint32_t number) {
  if (job->boards != NULL) {
    job->boards->number = number;
    job->boards->wish = EVEN_WISH_NOTHING;
    job->boards->refused = false;
    job->boards->placed = 0;
  }
}

/* -1: it has none. */
static int first_member(const even_job *job, uint32_t number) {
  for (int rank = 0; rank < (int)job->count; rank++) {
    if (even_generation_has(job->generation, rank, number)) {
      return rank;
    }
  }
  return -1;
}

static bool is_here(const even_job *job, int rank) {
  return rank >= 0 && even_job_is_here(job, (size_t)rank);
}

/* ---- the leader's ---- */

void even_boards_write(const even_job *job, uint32_t number, even_text *out) {
  char address[EVEN_GENERATION_ADDRESS];
  uint32_t port = even_generation_port(job->generation, number, 0, address);
  even_json json = even_json_begin(out, 0);
  even_json_object(&json, NULL);
  even_json_integer(&json, "number", number);
  even_json_array(&json, "members");
  for (size_t i = 0; i < job->count; i++) {
    if (even_generation_has(job->generation, (int)i, number)) {
      even_json_integer(&json, NULL, (int64_t)i);
    }
  }
  even_json_array_end(&json);
  even_json_integer(&json, "wish", (int64_t)even_generation_wished(job->generation));
  even_json_bool(&json, "refused", even_generation_refused(job->generation));
  if (port != 0) {
    even_json_integer(&json, "port", port);
    even_json_string(&json, "address", address[0] == '\0' ? job->master_address : address);
  }
  even_gifts_write(job, number, &json);
  even_json_object_end(&json);
}

/* One in a killed one's place catches up once it has said what it knows. */
static void tell_host(const even_host_agent *agent, const even_text *text) {
  if (agent->busy && agent->follows && !agent->renewed && agent->link != NULL &&
      even_link_send(agent->link, EVEN_MESSAGE_GENERATION, text->data, NULL, 0) != EVEN_OK) {
    even_error_clear(); /* lack of memory: its ranks give up when nobody tells them more, and the job restarts */
  }
}

static void tell_hosts(even_job *job, uint32_t number) {
  even_text text = EVEN_TEXT_EMPTY;
  even_boards_write(job, number, &text);
  for (size_t i = 1; even_text_status(&text) == EVEN_OK && i < job->hosts->count; i++) {
    tell_host(&job->hosts->agents[i], &text);
  }
  even_text_free(&text);
}

uint32_t even_boards_newest_of(const json_t *runs) {
  const json_t *list = json_object_get(runs, "generations");
  const json_t *last = json_array_get(list, json_array_size(list) - 1);
  return (uint32_t)json_integer_value(json_object_get(last, "number"));
}

even_status even_boards_catch_up(even_job *job, const even_host_agent *agent, uint32_t known) {
  if (job->boards == NULL) {
    return EVEN_OK;
  }
  uint32_t newest = even_generation_number(job->generation);
  if (known > newest || newest - known >= EVEN_GENERATIONS_KEPT) {
    return even_fail(EVEN_ERR_PEER_LOST, "host %s knows of generation %u, and the others are at %u", agent->name, known,
                     newest);
  }
  for (uint32_t number = known; number <= newest; number++) {
    even_text text = EVEN_TEXT_EMPTY;
    even_boards_write(job, number, &text);
    even_status status = even_text_status(&text);
    if (status == EVEN_OK) {
      tell_host(agent, &text);
    }
    even_text_free(&text);
    EVEN_TRY(status);
  }
  return EVEN_OK;
}

/* One that came while others were at some generation already: from now on it follows. */
static void let_follow(even_job *job, even_host_agent *agent) {
  even_text text = EVEN_TEXT_EMPTY;
  if (agent->follows) {
    return;
  }
  agent->follows = true;
  even_boards_turn(job); /* what the others do not know yet it learns with this */
  even_boards_write(job, even_generation_number(job->generation), &text);
  if (even_text_status(&text) == EVEN_OK) {
    tell_host(agent, &text);
  }
  even_text_free(&text);
}

static void lead(even_job *job) {
  even_boards *boards = job->boards;
  char address[EVEN_GENERATION_ADDRESS];
  uint32_t number = even_generation_number(job->generation);
  even_generation_wish wish = even_generation_wished(job->generation);
  bool refused = even_generation_refused(job->generation);
  bool met = even_generation_port(job->generation, number, 0, address) != 0;
  while (boards->number + 1 < number) {
    tell_hosts(job, ++boards->number);
  }
  if (boards->number != number || boards->wish != wish || boards->refused != refused ||
      (met && boards->placed != number) || boards->gifts != even_gifts_changes(job)) {
    boards->gifts = even_gifts_changes(job);
    boards->number = number;
    boards->wish = wish;
    boards->refused = refused;
    boards->placed = met ? number : boards->placed;
    tell_hosts(job, number);
  }
}

/* Where other hosts find this one: what came by a way that only this machine has is reached as this machine is. */
static const char *address_of(const even_job *job, const even_host_agent *agent) {
  char local[64];
  even_socket_local(agent->link->fd, local, sizeof local);
  bool near = strncmp(agent->link->peer, "127.", 4) == 0 || strcmp(local, agent->link->peer) == 0;
  return near ? job->master_address : agent->link->peer;
}

static bool is_of(const even_host_agent *agent, json_int_t rank) {
  return rank >= 0 && even_host_agent_has(agent, (size_t)rank);
}

static even_status take_words(even_job *job, const even_host_agent *agent, const json_t *content) {
  const json_t *rank = json_object_get(content, "rank");
  json_int_t number = json_integer_value(rank);
  json_int_t stands = json_integer_value(json_object_get(content, "stands"));
  json_int_t took = json_integer_value(json_object_get(content, "took"));
  json_int_t doubts = json_integer_value(json_object_get(content, "doubts"));
  json_int_t early = json_integer_value(json_object_get(content, "early"));
  even_generation_words words = {.said = json_is_true(json_object_get(content, "said")),
                                 .offers = json_is_true(json_object_get(content, "offers"))};
  if (!json_is_integer(rank) || !is_of(agent, number) || stands < 0 || took < 0 || doubts < 0 || early < 0) {
    return even_fail(EVEN_ERR_INPUT, "what a rank says that is not on host %s", agent->name);
  }
  words.early = (uint64_t)early;
  words.stands = (uint64_t)stands;
  words.took = (uint64_t)took;
  words.doubts = (uint64_t)doubts;
  (void)snprintf(words.why, sizeof words.why, "%s", even_json_text(content, "why"));
  even_generation_repeat(job->generation, (int)number, &words);
  return EVEN_OK;
}

static void take_place(even_job *job, const even_host_agent *agent, const json_t *content) {
  json_int_t number = json_integer_value(json_object_get(content, "number"));
  json_int_t port = json_integer_value(json_object_get(content, "port"));
  int first = first_member(job, even_generation_number(job->generation));
  if (port >= 1 && port <= MOST_PORT && number == (json_int_t)even_generation_number(job->generation) &&
      is_of(agent, first)) {
    even_generation_place(job->generation, (uint32_t)number, (uint32_t)port, address_of(job, agent));
  }
}

even_status even_boards_take(even_job *job, even_host_agent *agent, const json_t *content) {
  size_t at = 0;
  json_t *one = NULL;
  if (job->boards == NULL) {
    return even_fail(EVEN_ERR_INPUT, "what ranks say of going on, in a job that does not");
  }
  json_array_foreach(json_object_get(content, "ranks"), at, one) {
    EVEN_TRY(take_words(job, agent, one));
  }
  take_place(job, agent, content);
  EVEN_TRY(even_gifts_take_report(job, agent, content));
  if (json_is_true(json_object_get(content, "begun"))) {
    let_follow(job, agent);
  }
  return EVEN_OK;
}

/* ---- the others' ---- */

static bool same_words(const even_generation_words *one, const even_generation_words *other) {
  return one->said == other->said && one->offers == other->offers && one->early == other->early &&
         one->stands == other->stands && one->took == other->took && one->doubts == other->doubts &&
         strcmp(one->why, other->why) == 0;
}

static void add_words(even_json *json, size_t rank, const even_generation_words *words) {
  even_json_object(json, NULL);
  even_json_integer(json, "rank", (int64_t)rank);
  even_json_bool(json, "said", words->said);
  even_json_integer(json, "early", (int64_t)words->early);
  even_json_string(json, "why", words->why);
  even_json_bool(json, "offers", words->offers);
  even_json_integer(json, "stands", (int64_t)words->stands);
  even_json_integer(json, "took", (int64_t)words->took);
  even_json_integer(json, "doubts", (int64_t)words->doubts);
  even_json_object_end(json);
}

/* What a rank of this host has said that the leader does not know; false: nothing. */
static bool news_of(const even_job *job, size_t rank, even_generation_words *words) {
  even_generation_hear(job->generation, (int)rank, words);
  return !same_words(words, &job->boards->told[rank]);
}

static bool any_news(const even_job *job) {
  even_generation_words words;
  for (size_t i = 0; i < job->count; i++) {
    if (even_job_is_here(job, i) && news_of(job, i, &words)) {
      return true;
    }
  }
  return false;
}

static void add_news(even_job *job, even_json *json) {
  even_json_array(json, "ranks");
  for (size_t i = 0; i < job->count; i++) {
    even_generation_words words;
    if (even_job_is_here(job, i) && news_of(job, i, &words)) {
      add_words(json, i, &words);
      job->boards->told[i] = words;
    }
  }
  even_json_array_end(json);
}

bool even_boards_report(even_job *job, even_text *out) {
  even_boards *boards = job->boards;
  char address[EVEN_GENERATION_ADDRESS];
  uint32_t number = even_generation_number(job->generation);
  uint32_t port = boards->met != number && is_here(job, first_member(job, number))
                      ? even_generation_port(job->generation, number, 0, address)
                      : 0;
  bool begins = job->late && !boards->begun;
  if (port == 0 && !any_news(job) && !even_gifts_any_failed(job) && !begins) {
    return false;
  }
  even_json json = even_json_begin(out, 0);
  even_json_object(&json, NULL);
  add_news(job, &json);
  if (port != 0) {
    boards->met = number;
    even_json_integer(&json, "number", number);
    even_json_integer(&json, "port", port);
  }
  even_gifts_report(job, &json);
  if (begins) {
    boards->begun = true;
    even_json_bool(&json, "begun", true);
  }
  even_json_object_end(&json);
  return true;
}

static even_status read_members(const even_job *job, const json_t *content, bool *members) {
  size_t at = 0;
  json_t *one = NULL;
  json_array_foreach(json_object_get(content, "members"), at, one) {
    json_int_t rank = json_integer_value(one);
    if (!json_is_integer(one) || rank < 0 || rank >= (json_int_t)job->count) {
      return even_fail(EVEN_ERR_INPUT, "a generation with a rank that the job has not");
    }
    members[rank] = true;
  }
  return EVEN_OK;
}

/* The others go on without it: what it has left here is cleared up. */
static void clear_up(even_job *job, uint32_t number, const bool *members) {
  for (size_t i = 0; i < job->count; i++) {
    const even_job_rank *rank = &job->ranks[i];
    bool gone =
        !rank->elsewhere && even_generation_has(job->generation, (int)i, number - 1) && !members[i] && !rank->alive;
    if (gone && (rank->end.signal != 0 || rank->end.code != 0)) {
      (void)even_process_signal_group(rank->pid, SIGKILL);
      even_job_snapshot_finish(job, i);
    }
  }
}

/* Whether its ranks know of no members yet. */
static bool is_fresh(const even_job *job) {
  return job->late && !job->boards->adopted && even_generation_number(job->generation) == 0;
}

static even_status take_number(even_job *job, uint32_t number, const json_t *content) {
  bool *members = NULL;
  EVEN_TRY(EVEN_NEW_ARRAY(&members, job->count));
  even_status status = read_members(job, content, members);
  bool fresh = is_fresh(job);
  if (status == EVEN_OK && !(fresh ? even_generation_adopt(job->generation, number, members)
                                   : even_generation_follow(job->generation, number, members))) {
    status = even_fail(EVEN_ERR_INPUT, "generation %u after %u", number, even_generation_number(job->generation));
  }
  job->boards->adopted = status == EVEN_OK;
  if (status == EVEN_OK && number > 0) {
    clear_up(job, number, members);
    for (size_t i = 0; i < job->count; i++) {
      if (members[i] && even_job_is_here(job, i) && !even_generation_has(job->generation, (int)i, number - 1)) {
        even_job_replace_joined(job, i);
      }
    }
  }
  even_free(members);
  return status;
}

even_status even_boards_follow(even_job *job, const json_t *content) {
  json_int_t number = json_integer_value(json_object_get(content, "number"));
  json_int_t port = json_integer_value(json_object_get(content, "port"));
  json_int_t wish = json_integer_value(json_object_get(content, "wish"));
  if (job->boards == NULL || number < 0 || number > UINT32_MAX || wish < EVEN_WISH_NOTHING || wish > EVEN_WISH_SAVE) {
    return even_fail(EVEN_ERR_INPUT, "a generation that is none");
  }
  if (number >= (json_int_t)even_generation_number(job->generation)) {
    EVEN_TRY(even_gifts_read(job, (uint32_t)number, content)); /* before the ranks see it */
  }
  if (number > (json_int_t)even_generation_number(job->generation) || is_fresh(job)) {
    EVEN_TRY(take_number(job, (uint32_t)number, content));
  }
  if (number == (json_int_t)even_generation_number(job->generation)) {
    even_generation_ask(job->generation, (even_generation_wish)wish);
    if (port >= 1 && port <= MOST_PORT && !is_here(job, first_member(job, (uint32_t)number))) {
      even_generation_place(job->generation, (uint32_t)number, (uint32_t)port, even_json_text(content, "address"));
    }
  }
  if (json_is_true(json_object_get(content, "refused"))) {
    even_generation_refuse(job->generation);
  }
  return EVEN_OK;
}

/* ---- both ---- */

void even_boards_turn(even_job *job) {
  even_text news = EVEN_TEXT_EMPTY;
  if (job->boards == NULL || job->generation == NULL) {
    return;
  }
  if (job->boards->seen != even_generation_number(job->generation)) {
    job->boards->seen = even_generation_number(job->generation);
    job->boards->seen_ns = even_clock_ns();
  }
  if (job->follower == NULL) {
    lead(job);
  } else if (even_boards_report(job, &news)) {
    even_job_follower_send(job, EVEN_MESSAGE_BOARD, &news);
  }
  even_gifts_turn(job); /* after who gets it was told that it comes */
}

/* Whether those of the newest generation are about to meet, at a place that a rank of this host will name. */
static bool awaits_place(const even_job *job) {
  char address[EVEN_GENERATION_ADDRESS];
  uint32_t number = even_generation_number(job->generation);
  return number > 0 && even_clock_ns() - job->boards->seen_ns < MEETING_NS && is_here(job, first_member(job, number)) &&
         even_generation_port(job->generation, number, 0, address) == 0;
}

/* Whether the leader asks ranks of this host to stand, and one does not yet. */
static bool awaits_standing(const even_job *job) {
  for (size_t i = 0; even_generation_wished(job->generation) != EVEN_WISH_NOTHING && i < job->count; i++) {
    if (job->ranks[i].alive && !job->ranks[i].elsewhere &&
        even_generation_has(job->generation, (int)i, job->boards->seen) &&
        !even_generation_stands(job->generation, (int)i)) {
      return true;
    }
  }
  return false;
}

static bool awaits_offer(const even_job *job) {
  for (size_t i = 0; i < job->count; i++) {
    if (job->ranks[i].alive && !job->ranks[i].elsewhere && even_job_is_outside(job, i) &&
        !even_generation_offers(job->generation, (int)i)) {
      return true;
    }
  }
  return false;
}

int even_boards_look_ms(const even_job *job) {
  if (job->boards == NULL || job->generation == NULL || job->stage != EVEN_JOB_RUNS || job->alive == 0) {
    return 0;
  }
  if (awaits_place(job) || even_gifts_await(job)) {
    return MEETING_MS;
  }
  if (job->follower == NULL) {
    return 0;
  }
  return awaits_standing(job) ? STANDING_MS : awaits_offer(job) ? OFFERING_MS : 0;
}
