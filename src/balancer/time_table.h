/* A measured time table as a function of whole samples, and its inverse. */
#ifndef EVEN_BALANCER_TIME_TABLE_H
#define EVEN_BALANCER_TIME_TABLE_H

#include <evenstep/balancer.h>

/* EVEN_ERR_ARGUMENT with the rank and the point when the table breaks the rules of even_time_table. */
even_status even_time_table_check(const even_time_table *table, size_t rank) EVEN_MUST_USE;

/* The largest b in least … most whose time is within `seconds`; `least` when none is (its own time is not
 * looked at). `table` was checked. */
int64_t even_time_table_reach(const even_time_table *table, double seconds, int64_t least, int64_t most);

#endif
