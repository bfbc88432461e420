/* Three agents of one job in this process, on one loop: a leader and two hosts that serve it, joined by real links over
 * loopback. */
#ifndef EVEN_TESTS_PARCEL_STAR_H
#define EVEN_TESTS_PARCEL_STAR_H

#include "orchestrator/parcel.h"

enum { STAR_HOSTS = 3, STAR_PATIENCE_S = 60 };

struct star;

/* One end of a link, as its agent has it. */
typedef struct star_end {
  struct star *star;
  int self;
  int other;
  even_link link;
} star_end;

/* A host, and what came to it. */
typedef struct star_host {
  struct star *star;
  even_parcels *parcels;
  star_end ends[STAR_HOSTS]; /* by the other one's number */
  even_status refuses;       /* what `offered` says */
  even_status dislikes;      /* what `arrived` says */
  int underway;              /* taken, and neither here nor failed */
  int most_underway;
  int arrived;
  int failed;
  even_parcel last;
  even_error why;  /* it failed */
  bool altered;    /* what came was not what had been sent */
  bool alters;     /* the next piece that it gets is changed on the way */
  uint64_t pieces; /* that it got */
  bool frozen;
} star_host;

typedef struct star {
  even_loop loop;
  even_loop_watch listening;
  int listener;
  int port;
  int accepted; /* connections */
  star_host hosts[STAR_HOSTS];
  even_status status; /* the first of what nobody else is told */
  uint64_t moved;     /* messages so far */
  size_t most_waiting;
  bool ends_expected; /* of links: they are counted */
  int ended;
  bool unread; /* what arrives is not compared */
  /* What is of no parcel, and the end of a link, as its end on host `self` has it; NULL: none comes, nobody asks. */
  even_status (*hears)(struct star *at, int self, int other, const even_message *message);
  void (*loses)(struct star *at, int self, int other);
} star;

/* What became of an offer. */
typedef struct star_offer {
  int told; /* times */
  even_error why;
  bool received;
} star_offer;

/* Joins them, and makes their parcels, of which each takes those of the name "test". */
even_status star_open(star *at) EVEN_MUST_USE;
void star_close(star *at);
/* A memory file whose bytes follow from `number`. */
even_status star_memory(uint64_t number, size_t bytes, int *fd) EVEN_MUST_USE;
even_status star_offer_test(star *at, int from, int to, uint64_t number, size_t bytes, star_offer *out) EVEN_MUST_USE;
/* Turns until `*what` is `wanted`, an error is told of, or nothing moves any more: then time passes all patience. */
even_status star_turn(star *at, const int *what, int wanted) EVEN_MUST_USE;
/* Turns until nothing moves. */
void star_rest(star *at);
/* The agent of `host` neither reads nor writes; and again. */
void star_freeze(star *at, int host);
void star_thaw(star *at, int host);

#endif
