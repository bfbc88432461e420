/* Parcels from the inside: what is being sent (parcel_send.c) and what is being taken (parcel_receive.c). */
#ifndef EVEN_ORCHESTRATOR_PARCEL_PARTS_H
#define EVEN_ORCHESTRATOR_PARCEL_PARTS_H

#include "checkpoint/checksums.h"
#include "orchestrator/parcel_wire.h"

typedef struct even_parcel_out {
  struct even_parcel_out *next;
  even_parcel parcel;
  uint64_t id;
  int fd;
  bool begun; /* the receiver takes it */
  uint64_t sent;
  uint64_t taken;
  uint64_t moved_ns; /* when it got on last */
  even_chunk_sums *sums;
  even_parcel_done done;
  void *context;
  bool over;     /* to be told of, and forgotten */
  bool received; /* it was taken there, whole; else: */
  even_error why;
} even_parcel_out;

typedef struct even_parcel_in {
  struct even_parcel_in *next;
  even_parcel parcel;
  uint64_t id;
  even_parcel_calls calls;
  int fd;
  bool accepted; /* whoever takes it has been told that it comes */
  bool begun;
  uint64_t got;
  uint64_t moved_ns;
  even_chunk_sums *sums;
  bool over;      /* to be forgotten */
  bool delivered; /* its file is somebody else's; else it failed: */
  bool silent;    /* the sender knows, or is gone */
  even_error why;
} even_parcel_in;

typedef struct even_parcel_handler {
  const char *name;
  even_parcel_calls calls;
} even_parcel_handler;

struct even_parcels {
  even_parcels_params params;
  even_parcel_handler *handlers;
  size_t handler_count;
  even_parcel_out *outs;
  even_parcel_in *ins;
  uint64_t next_id;
  char *piece; /* EVEN_PARCEL_PIECE bytes, once anything is offered */
  bool busy;   /* a call of the caller's may be under way: whoever made that clears up */
};

/* ---- parcel.c ---- */
/* EVEN_ERR_PEER_LOST: there is no way. */
even_status even_parcels_tell(even_parcels *parcels, int host, const even_parcel_note *note, const void *data,
                              size_t bytes) EVEN_MUST_USE;
/* `why` NULL: it was taken. What need not be known: the other end's patience is finite. Keeps the last error. */
void even_parcels_tell_end(even_parcels *parcels, const even_parcel *parcel, uint64_t id, bool back,
                           const even_error *why);

/* ---- parcel_send.c ---- */
void even_parcels_send_on(even_parcels *parcels);
void even_parcels_hear_taken(even_parcels *parcels, const even_parcel_note *note);
void even_parcels_hear_end_back(even_parcels *parcels, const even_parcel_note *note);
/* Fails what does not get on. */
void even_parcels_check_outs(even_parcels *parcels, uint64_t now);
/* For the last error; `host` 0: all. */
void even_parcels_lose_outs(even_parcels *parcels, int host);
/* For the last error: those of that name, of whose end nobody is told here. */
void even_parcels_withdraw_outs(even_parcels *parcels, const char *name);
/* Tells of one that is over, and forgets it; whether there was any. */
bool even_parcels_forget_out(even_parcels *parcels);
void even_parcels_free_outs(even_parcels *parcels);

/* ---- parcel_receive.c ---- */
void even_parcels_hear_offer(even_parcels *parcels, const even_parcel_note *note);
void even_parcels_hear_piece(even_parcels *parcels, const even_parcel_note *note, const even_message *message);
void even_parcels_hear_end_forward(even_parcels *parcels, const even_parcel_note *note);
/* Takes those whose turn it is. */
void even_parcels_begin_next(even_parcels *parcels);
void even_parcels_check_ins(even_parcels *parcels, uint64_t now);
void even_parcels_lose_ins(even_parcels *parcels, int host);
/* For the last error: those of that name, of whose end nobody is told here. */
void even_parcels_withdraw_ins(even_parcels *parcels, const char *name);
bool even_parcels_forget_in(even_parcels *parcels);
void even_parcels_free_ins(even_parcels *parcels);

#endif
