"""Tests of groups that workers join and leave one by one."""
