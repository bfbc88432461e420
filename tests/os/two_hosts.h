/* Two hosts and one folder: the file system says that it is NFS, the hosts' names are made up, and so is the clock. */
#ifndef EVEN_TESTS_OS_TWO_HOSTS_H
#define EVEN_TESTS_OS_TWO_HOSTS_H

#include "os/lease.h"

#include <stdint.h>

extern char folder[64];
extern char sign[96]; /* in it */
extern char told[512];

extern uint64_t clock_ns;
extern uint64_t suspended_ns; /* the computer slept, and CLOCK_MONOTONIC with it */
extern uint64_t slept_ns;
extern void (*while_asleep)(void);

/* Of each test: host a, and an empty folder. */
int two_hosts_make(void **state);
int two_hosts_end(void **state);
/* The made-up calls, again after fault_reset or fault_os. */
void play(void);
/* This process is one of that host now. */
void host(const char *name);

even_lease_params params_of(const char *owner, uint64_t turn);
even_lease *taken(const char *owner, uint64_t turn);
/* And released again. */
even_status try_to_take(const even_lease_params *params);
/* Times of a file are coarse: they move by seconds here. */
void move_times(void);
/* How many files the folder has. */
int entries(void);

#endif
