/* A measured time table as a function of whole samples. */
#ifndef EVEN_BALANCER_TIME_TABLE_H
#define EVEN_BALANCER_TIME_TABLE_H

#include <evenstep/balancer.h>

/* EVEN_ERR_ARGUMENT with the rank and the point when the table breaks the rules of even_time_table. */
even_status even_time_table_check(const even_time_table *table, size_t rank) EVEN_MUST_USE;

/* A first guess at the most samples whose time is within `seconds`, from the segment in which that lies; may be off by
 * rounding, NaN or infinite where the table does not say. `table` was checked. */
double even_time_table_guess(const even_time_table *table, double seconds);

#endif
