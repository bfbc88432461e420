/* Writing the flight record: a rank's own calls, and what ranks of other hosts have told of theirs. */
#include "comm/flight.h"

#include "comm/flight_record.h"
#include "os/clock.h"

#include <stdio.h>
#include <string.h>

#define RELAXED memory_order_relaxed
/* For how long another rank of this host may write a report. */
#define TAKEN_NS ((uint64_t)20 * 1000000u)
#define LOOK_NS ((uint64_t)50 * 1000u)

static even_flight_record *own_record(const even_flight_writer *flight) {
  return even_flight_record_of(flight, flight->rank);
}

static uint64_t pack(const even_comm_call *call) {
  return (uint64_t)call->kind | (uint64_t)call->dtype << 16 | (uint64_t)call->op << 32 |
         (uint64_t)(uint32_t)call->root << 48;
}

typedef struct slot_words {
  uint64_t number;
  uint64_t began_ns;
  uint64_t ended_ns;
  uint64_t count;
  uint64_t what;
  uint64_t state;
  uint64_t site;
  uint64_t chain;
} slot_words;

static void write_slot(even_flight_record *record, const slot_words *words) {
  even_flight_slot *slot = even_flight_slot_of(record, words->number);
  atomic_store_explicit(&slot->number, 0, RELAXED);
  atomic_thread_fence(memory_order_release);
  atomic_store_explicit(&slot->began_ns, words->began_ns, RELAXED);
  atomic_store_explicit(&slot->ended_ns, words->ended_ns, RELAXED);
  atomic_store_explicit(&slot->count, words->count, RELAXED);
  atomic_store_explicit(&slot->what, words->what, RELAXED);
  atomic_store_explicit(&slot->state, words->state, RELAXED);
  atomic_store_explicit(&slot->site, words->site, RELAXED);
  atomic_store_explicit(&slot->chain, words->chain, RELAXED);
  atomic_store_explicit(&slot->number, words->number, memory_order_release);
}

static void write_site(even_flight_record *record, uint64_t number, const char *text) {
  uint64_t words[EVEN_FLIGHT_SITE_BYTES / sizeof(uint64_t)] = {0};
  even_flight_site *site = &record->sites[number % EVEN_FLIGHT_SITES];
  (void)snprintf((char *)words, sizeof words, "%s", text);
  atomic_store_explicit(&site->number, 0, RELAXED);
  atomic_thread_fence(memory_order_release);
  for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
    atomic_store_explicit(&site->text[i], words[i], RELAXED);
  }
  atomic_store_explicit(&site->number, number, memory_order_release);
}

/* ---- this rank's ---- */

void even_flight_begin(even_flight_writer *flight, const even_comm_call *call, uint64_t number) {
  flight->number = number;
  if (flight->records == NULL || flight->lent) {
    return;
  }
  const slot_words words = {.number = number,
                            .began_ns = even_clock_coarse_ns(),
                            .count = call->count,
                            .what = pack(call),
                            .state = EVEN_FLIGHT_BEGUN,
                            .site = flight->site,
                            .chain = flight->chain};
  write_slot(own_record(flight), &words);
  flight->under_way = true;
}

void even_flight_end(even_flight_writer *flight, even_status status) {
  if (!flight->under_way) {
    return;
  }
  even_flight_slot *slot = even_flight_slot_of(own_record(flight), flight->number);
  atomic_store_explicit(&slot->ended_ns, even_clock_coarse_ns(), RELAXED);
  atomic_store_explicit(&slot->state, status == EVEN_OK ? EVEN_FLIGHT_DONE : EVEN_FLIGHT_FAILED, memory_order_release);
  flight->under_way = false;
}

void even_flight_end_call(even_flight_writer *flight, uint64_t number, even_status status) {
  if (flight->records == NULL || flight->lent) {
    return;
  }
  even_flight_slot *slot = even_flight_slot_of(own_record(flight), number);
  if (atomic_load_explicit(&slot->number, RELAXED) == number) {
    atomic_store_explicit(&slot->ended_ns, even_clock_coarse_ns(), RELAXED);
    atomic_store_explicit(&slot->state, status == EVEN_OK ? EVEN_FLIGHT_DONE : EVEN_FLIGHT_FAILED,
                          memory_order_release);
  }
}

/* Returns the site's number. */
static uint64_t keep_site(even_flight_writer *flight, const char *text) {
  write_site(own_record(flight), ++flight->sites, text);
  return flight->sites;
}

void even_flight_set_site(even_flight_writer *flight, const char *text) {
  if (flight->records != NULL && !flight->lent) {
    flight->site = text == NULL ? 0 : keep_site(flight, text);
  }
}

void even_flight_ask_site(even_flight_writer *flight, even_comm_site_call *call, void *context) {
  flight->ask = call;
  flight->context = context;
}

void even_flight_say(even_flight_writer *flight) {
  char text[EVEN_FLIGHT_SITE_BYTES];
  if (!flight->under_way) {
    return;
  }
  even_flight_record *record = own_record(flight);
  if (atomic_load_explicit(&record->said, RELAXED) == flight->number) {
    return;
  }
  if (flight->ask != NULL && flight->ask(flight->context, text, sizeof text)) {
    atomic_store_explicit(&even_flight_slot_of(record, flight->number)->site, keep_site(flight, text),
                          memory_order_release);
  }
  atomic_store_explicit(&record->said, flight->number, memory_order_release);
}

void even_flight_drop(even_flight_writer *flight) {
  if (flight->records != NULL) {
    even_flight_record *record = own_record(flight);
    for (size_t i = 0; i < EVEN_FLIGHT_CALLS; i++) {
      atomic_store_explicit(&record->slots[i].number, 0, memory_order_release);
    }
    flight->records = NULL;
    flight->under_way = false;
  }
}

/* ---- other hosts' ---- */

void even_flight_report_make(const even_flight_writer *flight, int rank, even_flight_report *out) {
  *out = (even_flight_report){.rank = rank};
  if (flight->records == NULL) {
    return;
  }
  even_flight_record *record = even_flight_record_of(flight, rank);
  even_flight_call call;
  even_comm_call words;
  uint64_t said = atomic_load_explicit(&record->said, memory_order_acquire); /* first: what it says of is there then */
  uint64_t number = even_flight_last_number(record);
  uint64_t now = even_clock_ns();
  if (!even_flight_read_call(record, number, &call) || !even_flight_call_of(flight, rank, number, &words)) {
    return; /* none yet, or it changes just now */
  }
  out->number = number;
  out->state = (uint32_t)call.state;
  out->began_ago_ns = now > call.began_ns ? now - call.began_ns : 0;
  out->ended_ago_ns = call.ended_ns != 0 && now > call.ended_ns ? now - call.ended_ns : 0;
  out->count = words.count;
  out->what = pack(&words);
  out->said = said;
  memcpy(out->site, call.site, sizeof out->site);
}

/* The clocks of two hosts have nothing in common: times cross as what has passed since. */
static uint64_t before(uint64_t now_ns, uint64_t ago_ns) {
  return ago_ns < now_ns ? now_ns - ago_ns : 0;
}

static void keep_call(even_flight_record *record, const even_flight_report *report) {
  uint64_t now = even_clock_ns();
  bool ended = report->state == EVEN_FLIGHT_DONE || report->state == EVEN_FLIGHT_FAILED;
  slot_words words = {.number = report->number,
                      .began_ns = before(now, report->began_ago_ns),
                      .ended_ns = ended ? before(now, report->ended_ago_ns) : 0,
                      .count = report->count,
                      .what = report->what,
                      .state = report->state};
  if (report->site[0] != '\0') {
    char site[EVEN_FLIGHT_SITE_BYTES];
    (void)snprintf(site, sizeof site, "%.*s", (int)sizeof site - 1, report->site);
    words.site = report->number;
    write_site(record, words.site, site);
  }
  write_slot(record, &words);
}

bool even_flight_is_last(const even_flight_writer *flight, int rank) {
  return flight->records == NULL ||
         atomic_load_explicit(&even_flight_record_of(flight, rank)->last, memory_order_acquire) != 0;
}

/* Whether the report says more than what is kept of that call: reports of one rank may come by several groups, and in
 * any order. */
static bool says_more(even_flight_record *record, const even_flight_report *report) {
  uint64_t last = even_flight_last_number(record);
  if (report->number != last) {
    return report->number > last;
  }
  uint64_t state = atomic_load_explicit(&even_flight_slot_of(record, last)->state, RELAXED);
  return atomic_load_explicit(&record->said, RELAXED) != last &&
         (report->said == last || report->state != EVEN_FLIGHT_BEGUN || state == EVEN_FLIGHT_BEGUN);
}

/* Another rank of this host may be writing what the same rank has told: a matter of moments, except where it died at it
 * or was stopped. */
static void take(even_flight_record *record) {
  uint64_t until = even_clock_ns() + TAKEN_NS;
  while (atomic_exchange_explicit(&record->taken, 1u, memory_order_acquire) != 0 && even_clock_ns() < until) {
    even_clock_sleep_ns(LOOK_NS);
  }
}

void even_flight_report_keep(const even_flight_writer *flight, const even_flight_report *report, bool last) {
  if (flight->records == NULL || report->rank < 0 || report->rank >= flight->ranks || report->rank == flight->rank ||
      report->number == 0) {
    return;
  }
  even_flight_record *record = even_flight_record_of(flight, report->rank);
  take(record);
  if (says_more(record, report)) { /* else it stays as it is: somebody may be reading it */
    keep_call(record, report);
    atomic_store_explicit(&record->said, report->said, memory_order_release);
  }
  if (last) {
    atomic_store_explicit(&record->last, 1u, memory_order_release);
  }
  atomic_store_explicit(&record->taken, 0u, memory_order_release);
}
